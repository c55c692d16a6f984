"""Reading and finishing on a runner."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.testing.util import assert_that, equal_to

from batchgen_beam.errors import PublishError
from batchgen_beam.settings import InputColumns
from batchgen_beam.storage.inputs import InputPlan, plan_input
from batchgen_beam.storage.totals import RunTotals
from batchgen_beam.transforms.finish import check_totals
from batchgen_beam.transforms.read import ReadShards
from tests.support.jobs import published
from tests.support.storing import local_pipeline, read_all, run_storage, write_lines, write_table


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """A Parquet file of three row groups, a JSONL file, and a file without rows."""
    write_table(tmp_path / "a.parquet", {
        "uuid": [f"a{index}" for index in range(25)], "prompt": [f"p{index}" for index in range(25)],
        "note": pa.array(range(25), pa.int16())}, row_group_size=10)
    write_table(tmp_path / "b.parquet", {"prompt": pa.array([], pa.string())})
    write_lines(tmp_path / "c.jsonl", [{"prompt": "x"}, {"prompt": "y"}, {"prompt": "y"}])
    return tmp_path


def test_the_step_says_what_the_readers_say(inputs: Path) -> None:
    """Rows, places and manifests of all files come out of the step as the readers give them, each once."""
    columns = InputColumns()
    rows, placements, manifests = read_all(inputs / "*", columns, unit_rows=7)
    with local_pipeline() as pipeline:
        read = pipeline | ReadShards(plan_input([f"{inputs}/*"], columns), columns, unit_rows=7)
        assert_that(read.rows | "Rows" >> beam.Map(repr), equal_to([repr(row) for row in rows]), "rows")
        wanted = [(row.key.text, place) for row, place in zip(rows, placements, strict=True)]
        assert_that(read.placements, equal_to(wanted), "placements")
        assert_that(read.manifests | "Manifests" >> beam.Values(), equal_to(manifests), "manifests")


def test_nothing_to_read_is_a_finished_run(tmp_path: Path) -> None:
    """An input without a single row gives zero units, a report of zeros and `_SUCCESS`."""
    write_table(tmp_path / "a.parquet", {"prompt": pa.array([], pa.string())})
    counts = run_storage([tmp_path / "a.parquet"], tmp_path / "out")
    assert (counts["units"], counts["rows"], counts["results"], counts["failed"]) == (0, 0, 0, 0)
    assert (tmp_path / "out" / "_SUCCESS").exists()
    assert not (tmp_path / "out" / "results").exists()


def test_keys_have_deterministic_coders(inputs: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Beam warns of no key whose encoding could differ between processes."""
    with caplog.at_level(logging.WARNING):
        run_storage([inputs / "*"], inputs / "out")
    assert [record.message for record in caplog.records if "deterministic" in record.message] == []


def test_the_report(inputs: Path) -> None:
    """run.json holds the run's name, the caller's facts, when it ended, and counts over all files."""
    counts = run_storage([inputs / "*"], inputs / "out")
    report = json.loads((inputs / "out" / "run.json").read_text())
    assert report == {"version": 1, "run": "run-1", "model": "fake", "finished": "2023-11-14T22:13:20+00:00",
                      "counts": counts}
    assert (counts["units"], counts["rows"], counts["results"], counts["completion_tokens"]) == (4, 28, 28, 84)
    assert (counts["repeated_ids"], counts["repeated_id_rows"]) == (0, 0)


def test_running_again_gives_the_same_files(inputs: Path) -> None:
    """Published names depend on the input only: a second run replaces every file by the same bytes."""
    options: dict[str, Any] = {"columns": InputColumns(keep=("note",)), "unit_rows": 7}
    run_storage([inputs / "*.parquet"], inputs / "out", **options)
    first = {path: path.read_bytes() for path in (inputs / "out" / "results").rglob("rg-*.parquet")}
    run_storage([inputs / "*.parquet"], inputs / "out", **options)
    assert {path: path.read_bytes() for path in (inputs / "out" / "results").rglob("rg-*.parquet")} == first
    assert len(first) == 5
    assert [row["note"] for row in published(inputs / "out")] == list(range(25))


def test_counts_that_do_not_balance_stop_the_run() -> None:
    """A row that is neither answered nor failed is never covered by `_SUCCESS`."""
    with pytest.raises(PublishError, match="3 rows were read, but 1 results and 1 failures"):
        check_totals(RunTotals(rows=3, results=1, failures={"CANCELLED": 1}), rows=None)


def without_last_file(plan: InputPlan) -> InputPlan:
    """A plan whose last file is never read."""
    return replace(plan, files=plan.files[:-1])


def test_a_lost_read_stops_the_run(tmp_path: Path) -> None:
    """Rows that vanish with their unit, answers and manifest alike, are missed against the footers."""
    for name in "ab":
        write_table(tmp_path / f"{name}.parquet", {"prompt": ["p", "q", "r"]})
    with pytest.raises(RuntimeError, match="the input files hold 6 rows, but 3 were read"):
        run_storage([tmp_path / "*.parquet"], tmp_path / "out", tamper_plan=without_last_file)
    assert not (tmp_path / "out" / "_SUCCESS").exists()
    assert not (tmp_path / "out" / "run.json").exists()
