"""The join of rows with the journal: which rows are computed, which go on, which are answered."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.testing.util import assert_that, equal_to

from batchgen_beam.errors import ErrorCode
from batchgen_beam.records import (
    Answer,
    ContinuationRecord,
    Failure,
    InputRow,
    RowKey,
    SamplingParams,
    TokenLogprobs,
    float_array,
    token_array,
)
from batchgen_beam.storage.journal import Journal, Part
from batchgen_beam.storage.settling import Entry
from batchgen_beam.storage.totals import RunTotals
from batchgen_beam.text.fake_folder import write_fake_folder
from batchgen_beam.transforms import skip_done
from batchgen_beam.transforms.host import HostHandle
from batchgen_beam.transforms.skip_done import GatherHashes, ReadPart, SkipDone, SkipOutputs
from batchgen_beam.transforms.wire import pack, unpack
from tests.support.hosting import host_handle, input_row
from tests.support.storing import local_pipeline, outcome

HELLO = token_array(list(b"hello"))
"""The fake tokenizer's ids are bytes."""


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> HostHandle:
    """The fake model."""
    return host_handle(write_fake_folder(tmp_path_factory.mktemp("model") / "fake"))


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """A journal without parts."""
    return Journal.of(str(tmp_path), "content")


def row(index: int) -> InputRow:
    """An input row."""
    return input_row(index, prompt=f"p {index}")


def answer(key: RowKey, **values: Any) -> Answer:
    """An outcome as the journal has it: without text."""
    logprobs = TokenLogprobs(chosen=float_array([-0.5] * len(HELLO)))
    return outcome(key, text=None, token_ids=HELLO, logprobs=logprobs, **values)


def record(key: RowKey, length: int = 2) -> ContinuationRecord:
    """A row that was left after `length` tokens."""
    return ContinuationRecord(
        key=key, prompt_ids=token_array([7]), generated_ids=HELLO[:length], params=SamplingParams(),
        logprobs=TokenLogprobs(chosen=float_array([-0.5] * length)), content_print="content", numeric_print="n")


def failure(key: RowKey, code: ErrorCode) -> Failure:
    """A row that failed."""
    return Failure(key=key, code=code, message="m", prompt_head="h")


def counts(wanted: tuple[int, int, int]) -> Callable[[list[RunTotals]], None]:
    """Checks rows that were answered and that went on, and parts that could not be read."""
    def check(parts: list[RunTotals]) -> None:
        total = RunTotals.sum(parts)
        assert (total.reused, total.resumed, total.journal_problems) == wanted

    return check


def skip(journal: Journal, handle: HostHandle, rows: Sequence[InputRow], *, computed: Iterable[str],
         resumed: Iterable[str] = (), answered: Iterable[tuple[str, str]] = (), totals: tuple[int, int, int],
         **options: Any) -> None:
    """Run the join over rows; check ids that are computed and resumed, (id, text or code), and three counts."""
    with local_pipeline() as pipeline:
        outputs: SkipOutputs = (pipeline | beam.Create(list(rows))
                                | SkipDone(journal, journal.parts(), handle, **options))
        assert_that(outputs.rows | "A" >> beam.Map(uuid_of), equal_to(sorted(computed)), label="rows")
        assert_that(outputs.resumed | "B" >> beam.Map(uuid_of), equal_to(sorted(resumed)), label="resumed")
        assert_that(outputs.answers | "C" >> beam.Map(said), equal_to(sorted(answered)), label="answers")
        assert_that(outputs.totals, counts(totals), label="totals")


def uuid_of(element: InputRow | ContinuationRecord) -> str:
    """The row's id."""
    return element.key.uuid


def said(keyed: tuple[str, Answer]) -> tuple[str, str]:
    """The row's id, and its text or code."""
    key, found = keyed
    assert key == found.key.text
    return found.key.uuid, str(found.code) if isinstance(found, Failure) else str(found.text)


def test_every_row_leaves_once_by_what_is_known_of_it(journal: Journal, handle: HostHandle) -> None:
    """Answered rows with their text, begun ones as records, the others as they came; strangers' entries are ignored."""
    keys = [row(index).key for index in range(6)]
    journal.write("a", [answer(keys[0]), record(keys[1]), failure(keys[2], ErrorCode.TEMPLATE_ERROR)])
    journal.write("b", [record(keys[0]), failure(keys[3], ErrorCode.CANCELLED), answer(RowKey("row-4", "edited"))])
    skip(journal, handle, [row(index) for index in range(6)], computed=["row-3", "row-4", "row-5"],
         resumed=["row-1"], answered=[("row-0", "hello"), ("row-2", "TEMPLATE_ERROR")], totals=(2, 1, 0))


def test_equal_rows_are_answered_by_one_entry(journal: Journal, handle: HostHandle) -> None:
    """Both rows count as found, there is one answer for both; equal rows that are computed all go on."""
    journal.write("a", [answer(row(0).key), record(row(1).key)])
    rows = [row(0), row(0), row(1), row(1), row(2), row(2)]
    skip(journal, handle, rows, computed=["row-2", "row-2"], resumed=["row-1"], answered=[("row-0", "hello")],
         totals=(2, 2, 0))


def test_failures_are_tried_again_by_code(journal: Journal, handle: HostHandle) -> None:
    """Of a named code only; a record beside the failure is where the row goes on."""
    keys = [row(index).key for index in range(3)]
    journal.write("a", [failure(keys[0], ErrorCode.TEMPLATE_ERROR), failure(keys[1], ErrorCode.NUMERIC_ERROR),
                        failure(keys[2], ErrorCode.NUMERIC_ERROR), record(keys[2])])
    skip(journal, handle, [row(index) for index in range(3)], computed=["row-1"], resumed=["row-2"],
         answered=[("row-0", "TEMPLATE_ERROR")], totals=(1, 1, 0), retry=frozenset({ErrorCode.NUMERIC_ERROR}))


def test_parts_that_can_not_be_read_are_counted(journal: Journal, handle: HostHandle) -> None:
    """A torn part, a foreign file and one that is gone: each is one problem, and the rows are computed."""
    journal.write("a", [answer(row(0).key)])
    torn, gone = (journal.write(run, [answer(row(1).key)]) for run in "bc")
    path = Path(torn.path.removeprefix("file://"))
    path.write_bytes(path.read_bytes()[:-9])
    path.with_name("foreign.parquet").write_bytes(b"PAR1 no part")
    parts = journal.parts()
    Path(gone.path.removeprefix("file://")).unlink()
    with local_pipeline() as pipeline:
        outputs: SkipOutputs = pipeline | beam.Create([row(0), row(1)]) | SkipDone(journal, parts, handle, rows=2)
        assert_that(outputs.rows | "A" >> beam.Map(uuid_of), equal_to(["row-1"]), label="rows")
        assert_that(outputs.totals, counts((1, 0, 3)), label="totals")


def hashes_of(rows: Iterable[InputRow]) -> bytes:
    """What the readers of parts know of the rows."""
    combine = GatherHashes()
    halves = [combine.create_accumulator(), combine.create_accumulator()]
    for index, one in enumerate(rows):
        combine.add_input(halves[index % 2], one)
    return combine.extract_output(combine.merge_accumulators(halves))


@pytest.mark.parametrize("piece", [1 << 30, 2_000])
def test_only_entries_of_rows_that_are_here_are_read(
        piece: int, journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many pieces a part is read in: each wanted entry once, no other; without rows it is not even opened."""
    monkeypatch.setattr(skip_done, "PIECE_BYTES", piece)
    part = journal.write("a", [answer(row(index).key) for index in range(3000)])
    assert part.size > 20_000
    wanted = [row(index) for index in (5, 2999, 5000)]
    found = list(ReadPart(journal).process(part, hashes_of([*wanted, wanted[0]])))
    assert sorted(entry.key.uuid for _, entry in found) == ["row-2999", "row-5"]
    assert list(ReadPart(journal).process(Part("nowhere", "a", 10, 0.0), hashes_of([]))) == []


@pytest.mark.parametrize("value", [
    input_row(1, prompt="p", temperature=0.5, messages=[{"role": "user", "content": None}]),
    InputRow(key=RowKey("x", "d"), values={}, problem="line 7 is not valid JSON"),
    record(RowKey("id\x1f", "d")), answer(RowKey("a", "d"), stop_reason=3),
    failure(RowKey("a", "d"), ErrorCode.CANCELLED),
])
def test_what_crosses_the_shuffle_comes_back_equal(value: InputRow | Entry) -> None:
    """Rows, records and answers."""
    assert unpack(pack(value)) == value


def test_the_counts_come_back_from_a_report() -> None:
    """What a pass stores, and a unit's record, is read as it was; a field of a later release is nothing to this one."""
    totals = RunTotals(rows=3, results=2, failures={"CANCELLED": 1}, reused=2, resumed=1, journal_problems=1)
    facts = json.loads(json.dumps(totals.as_facts()))
    assert RunTotals.from_facts({**facts, "of_tomorrow": 1}) == totals
