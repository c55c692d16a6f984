"""The record of a published unit: what it says, and when it lets the unit stay as it is."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchgen_beam.errors import ErrorCode
from batchgen_beam.records import OutputUnit
from batchgen_beam.settings import InputColumns
from batchgen_beam.storage.raw_rows import RawBatch, RawRow
from batchgen_beam.storage.totals import RunTotals
from batchgen_beam.storage.unit_reader import read_manifests
from batchgen_beam.storage.unit_records import (
    UnitRecord,
    UnitRecords,
    forget_record,
    read_record,
    recorded_names,
)
from batchgen_beam.storage.units import published_name
from tests.support.storing import read_all, write_lines, write_table

UNIT = OutputUnit("file:///in/a.parquet", 0, 1)
NAME = published_name(UNIT)
TOTALS = RunTotals(units=1, rows=5, results=4, failures={"EMPTY_PROMPT": 1}, finish_reasons={"stop": 4},
                   completion_tokens=12)


def records_of(output: Path, **values: Any) -> UnitRecords:
    """The records of one run."""
    return UnitRecords(**{"output": str(output), "content": "c", "model": "m", "run": "run-1", **values})


def record_of(output: Path, *, totals: RunTotals = TOTALS, transient: int = 0, **values: Any) -> UnitRecord:
    """The record of the unit, by one run."""
    return records_of(output, **values).record(rows="rows", totals=totals, transient=transient)


def write(output: Path, **values: Any) -> None:
    """Record the unit."""
    records_of(output).write(NAME, record_of(output, **values))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """An output folder with the files of one unit, and its record."""
    for kind in ("results", "failures"):
        path = tmp_path / kind / NAME
        path.parent.mkdir(parents=True)
        path.touch()
    write(tmp_path)
    return tmp_path


def test_a_record_says_what_stands(output: Path) -> None:
    """The counts come back as they were; the run, the print, and which files there are."""
    record = read_record(str(output), NAME)
    assert record == UnitRecord(digest=records_of(output).digest("rows"), content="c", run="run-1", totals=TOTALS,
                                transient=0, files=("results", "failures"))
    assert recorded_names(str(output)) == [NAME]
    forget_record(str(output), NAME)
    assert read_record(str(output), NAME) is None


@pytest.mark.parametrize("content", [b"", b"{}", b'{"version": 99}', b"[1]", b'{"version": 1, "digest": "d"}'])
def test_what_is_no_record_counts_as_none(output: Path, content: bytes) -> None:
    """A torn record, or one of a later release, never keeps a unit from being published again."""
    (output / "_units" / f"{NAME}.json").write_bytes(content)
    assert read_record(str(output), NAME) is None
    assert records_of(output, run="run-2").reusable(UNIT.shard, 0, 2) == {}


def test_the_rows_content_model_and_columns_decide(output: Path) -> None:
    """The digest of a unit changes with each of them."""
    digests = {records_of(output, **values).digest(rows) for rows, values in (
        ("rows", {}), ("others", {}), ("rows", {"content": "d"}), ("rows", {"model": "n"}))}
    assert len(digests) == 4


@pytest.mark.parametrize("slices", [2, None])
def test_a_complete_unit_may_stay(output: Path, slices: int | None) -> None:
    """Whether or not it is known how many units the row group has; those of another row group are not asked for."""
    records = records_of(output, run="run-2")
    assert list(records.reusable(UNIT.shard, 0, slices)) == [NAME]
    assert records.reusable(UNIT.shard, 1, slices) == {}


def test_an_incomplete_unit_is_done_again(output: Path) -> None:
    """Other content, a code that is to be tried again, a transient failure, or a file that is gone."""
    def stays(**values: Any) -> bool:
        return bool(records_of(output, **{"run": "run-2", **values}).reusable(UNIT.shard, 0, 2))

    assert stays()
    assert stays(retry=frozenset({ErrorCode.TEMPLATE_ERROR}))
    assert not stays(retry=frozenset({ErrorCode.TEMPLATE_ERROR, ErrorCode.EMPTY_PROMPT}))
    assert not stays(content="other")
    (output / "failures" / NAME).unlink()
    assert not stays()
    (output / "failures" / NAME).touch()
    write(output, transient=1)
    assert not stays()
    assert stays(run="run-1", own=True, retry=frozenset(ErrorCode)), "the run that met the failures has tried"
    assert not stays(run="run-1"), "a reading step that is done again does not see what came of it at first"


def test_what_another_run_has_published_stands(output: Path) -> None:
    """The same answers to the same rows are not written twice, and their record is there all the time."""
    records = records_of(output, run="run-2")
    assert records.stands(NAME, record_of(output, run="run-2"))
    (output / "results" / NAME).unlink()
    assert not records.stands(NAME, record_of(output, run="run-2"))
    assert recorded_names(str(output)) == [NAME]
    (output / "results" / NAME).touch()
    write(output, transient=1)
    assert not records.stands(NAME, record_of(output, run="run-2", transient=1)), "it was tried again"
    assert recorded_names(str(output)) == [NAME]


def test_a_record_that_says_otherwise_goes_before_the_files(output: Path) -> None:
    """Killed while a unit's files are replaced, a run leaves none that counts as complete."""
    better = replace(TOTALS, results=5, failures={})
    assert not records_of(output).stands(NAME, record_of(output, totals=better))
    assert recorded_names(str(output)) == []


def test_only_units_of_earlier_runs_count_as_skipped(output: Path) -> None:
    """A run that meets a unit which it has published itself counts its rows once, as its own."""
    record = read_record(str(output), NAME)
    assert record is not None
    assert records_of(output).kept(record) == TOTALS
    assert records_of(output, run="run-2").kept(record) == replace(TOTALS, skipped_units=1, skipped_rows=5)


def large_batches(count: int) -> Iterator[RawBatch]:
    """Batches of 10 rows of 100 kB, each with as much to keep."""
    for start in range(0, 10 * count, 10):
        texts = [f"{row} {'x' * 100_000}" for row in range(start, start + 10)]
        rows = [RawRow(start + index, True, str(start + index), {"prompt": text}) for index, text in enumerate(texts)]
        yield RawBatch(rows, pa.record_batch({"note": texts}))


def test_digests_hold_no_rows() -> None:
    """The units of 120 MB of rows are told apart within a few batches' memory."""
    tracemalloc.start()
    try:
        manifests = list(read_manifests(large_batches(60), "file:///a", 0, id_column="uuid"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [len(manifest.keys) for manifest in manifests] == [600]
    assert peak < 12 << 20


def digests(path: Path, **options: Any) -> list[str]:
    """The digests of an input's units."""
    return [manifest.digest for manifest in read_all(path, **options)[2]]


def test_the_digest_of_rows_changes_with_what_is_published_of_them(tmp_path: Path) -> None:
    """Keys, their order, and kept values count; what nobody asked to keep does not, nor how the file is encoded."""
    columns = {"uuid": ["a", "b", "c"], "prompt": ["1", "2", "3"], "note": [1, None, 3]}
    path, keep = tmp_path / "a.parquet", {"columns": InputColumns(keep=("note",))}
    write_table(path, columns)
    first, kept = digests(path), digests(path, **keep)
    write_table(path, {**columns, "note": pa.array([1, None, 3]).dictionary_encode()})
    assert (digests(path), digests(path, **keep)) == (first, kept)
    write_table(path, {**columns, "note": [1, None, 4]})
    assert digests(path) == first
    assert digests(path, **keep) != kept
    write_table(path, {**columns, "note": pa.array([1, None, 3], pa.int32())})
    assert digests(path, **keep) != kept, "results would have another type"
    for changed in ({"prompt": ["1", "2", "4"]}, {"uuid": ["a", "c", "b"]}):
        write_table(path, {**columns, **changed})
        assert digests(path) != first


def test_the_digest_of_lines_changes_with_their_places(tmp_path: Path) -> None:
    """A blank line moves the numbers of the lines below it, which results report."""
    path = tmp_path / "a.jsonl"
    write_lines(path, [{"prompt": "x", "uuid": "1"}, {"prompt": "y", "uuid": "2"}])
    first = digests(path)
    write_lines(path, [{"prompt": "x", "uuid": "1"}, "", {"prompt": "y", "uuid": "2"}])
    assert digests(path) != first
