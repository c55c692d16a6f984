"""Compaction: fewer parts that say the same, whatever happens in between."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen_beam.errors import ErrorCode
from batchgen_beam.storage.compaction import (
    BATCH_BYTES,
    FULL_BYTES,
    MERGE_BYTES,
    MERGE_ENTRIES,
    CompactionResult,
    compact,
    compaction_batches,
    ended_runs,
)
from batchgen_beam.storage.journal import MERGED, Journal, Part
from batchgen_beam.storage.journal_rows import encode_entries
from batchgen_beam.storage.journal_writer import PART_ENTRIES
from batchgen_beam.storage.settling import Entry, settle_entries
from tests.package_sources import ROOT
from tests.storage.entries import bits, failure, outcome, record
from tests.support.watched_files import failing, watched

NOW = 1_700_000_000.0

KILLED_BEFORE_A_DELETE = """
import os, signal, sys
from batchgen_beam.storage.compaction import compact
from batchgen_beam.storage.journal import Journal
from tests.support.watched_files import WatchedFiles

left = [int(sys.argv[2])]

def die(path):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)

WatchedFiles.before_delete = die
journal = Journal(sys.argv[1])
compact(journal, "second", journal.parts())
"""


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """An empty journal in a store that tests can break."""
    return Journal.of(watched(tmp_path / "out"), "c")


def said(journal: Journal) -> list[str]:
    """What the journal comes to, row by row, bit for bit."""
    rows: dict[str, list[Entry]] = {}
    for part in journal.parts():
        for entry in journal.entries(part).entries:
            rows.setdefault(entry.key.text, []).append(entry)
    return sorted(bits(entry) for entries in rows.values() for entry in settle_entries(entries).entries)


def fill(journal: Journal) -> None:
    """Five parts of two runs: answers, repeats, records of answered and of unfinished rows, failures that pass."""
    for step in range(5):
        answered = [outcome(index, 5) for index in range(20 * step, 20 * step + 25)]
        running = [record(index, 3 + step) for index in range(90, 140)]
        failed = [failure(200 + step), failure(300 + step, ErrorCode.CANCELLED)]
        journal.write(f"run-{step % 2}", [*answered, *running, *failed])


def test_merging_changes_nothing_that_is_said(journal: Journal) -> None:
    """One part in place of five, without what is answered or outgrown, in the folder of the run that merged."""
    fill(journal)
    before, parts = said(journal), journal.parts()
    result = compact(journal, "second", parts)
    assert result == CompactionResult(read=5, written=1, deleted=5, entries_read=5 * 77, entries_written=len(before))
    [part] = journal.parts()
    assert part.run == "second"
    assert part.path.rsplit("/", 1)[1].startswith(MERGED)
    assert said(journal) == before
    assert compact(journal, "third", [part]) == CompactionResult(), "one part has nobody to merge with"
    assert journal.parts() == [part]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.builds(record, st.integers(0, 5), st.integers(0, 4))
                         | st.builds(outcome, st.integers(0, 5)) | st.builds(failure, st.integers(0, 5)), max_size=6),
                max_size=5), st.data())
def test_any_parts_merged_in_any_batches_say_the_same(journal: Journal, contents: list[list[Entry]],
                                                      data: st.DataObject) -> None:
    """Whatever is merged with whatever, in whatever order."""
    for part in journal.parts():
        journal.delete(part)
    for entries in contents:
        journal.write("r", entries)
    before = said(journal)
    for _ in range(2):
        parts = journal.parts()
        chosen = data.draw(st.lists(st.sampled_from(parts), unique=True) if parts else st.just([]))
        compact(journal, "s", chosen)
        assert said(journal) == before


def test_the_merged_part_is_written_before_anything_is_deleted(journal: Journal) -> None:
    """A merge that can't be written deletes nothing; a part that appears meanwhile is not touched."""
    fill(journal)
    before, parts = said(journal), journal.parts()

    def broken(path: str) -> None:
        raise PermissionError(13, "not here", path)

    with failing(broken), pytest.raises(PermissionError):
        compact(journal, "second", parts)
    assert journal.parts() == parts
    quiet = Journal(journal.folder.removeprefix("watched://"))

    def write_another(path: str) -> None:
        quiet.write("first", [outcome(777)])

    with failing(write_another):
        compact(journal, "second", parts)
    assert {part.run for part in journal.parts()} == {"first", "second"}
    assert said(journal) == sorted([*before, bits(outcome(777))])


@pytest.mark.parametrize("deleted", [0, 2])
def test_a_kill_between_writing_and_deleting_leaves_what_settles_equal(journal: Journal, deleted: int) -> None:
    """Both the merged part and what it was made of are there; the next compaction tidies up."""
    fill(journal)
    before = said(journal)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", KILLED_BEFORE_A_DELETE, journal.folder, str(deleted)],
                          cwd=ROOT, check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert len(journal.parts()) == 5 + 1 - deleted
    assert said(journal) == before
    compact(journal, "third", journal.parts())
    assert len(journal.parts()) == 1
    assert said(journal) == before


def test_bad_parts_are_reported_and_stay(journal: Journal) -> None:
    """Torn, foreign and vanished parts are no reason not to merge the others, and are never deleted."""
    fill(journal)
    before = said(journal)
    folder = Path(journal.run_folder("run-0").removeprefix("watched://"))
    data = encode_entries([outcome(1)])
    (folder / "torn.parquet").write_bytes(data[: len(data) // 2])
    (folder / "foreign.parquet").write_bytes(b"PAR1 not")
    gone = Part(journal.run_folder("run-0") + "/gone.parquet", "run-0", 7, 0.0)
    result = compact(journal, "second", [*journal.parts(), gone])
    assert (result.read, result.deleted, len(result.problems)) == (5, 5, 3)
    assert all(name in "".join(result.problems) for name in ("torn.parquet", "foreign.parquet", "gone.parquet"))
    assert sorted(path.name for path in folder.iterdir()) == ["foreign.parquet", "torn.parquet"]
    assert said(journal) == before


def test_records_of_a_later_release_are_not_merged_away(journal: Journal) -> None:
    """This release can't read them, the one that wrote them can: their part is reported and stays."""
    fill(journal)
    data = record(1).to_bytes()
    part = _part_with(journal, data[:4] + b"\x09\x00" + data[6:])
    result = compact(journal, "second", journal.parts())
    assert result.deleted == 5
    assert "is not merged: continuation record of version 9" in result.problems[0]
    assert part in {there.path for there in journal.parts()}


def _part_with(journal: Journal, payload: bytes) -> str:
    """A part whose one continuation has this payload."""
    table = pq.read_table(io.BytesIO(encode_entries([record(1)])))
    changed = table.set_column(4, table.schema.field("payload"), pa.array([payload], pa.binary()))
    path = Path(journal.run_folder("run-0").removeprefix("watched://")) / "later.parquet"
    pq.write_table(changed, path)
    return watched(path)


def test_two_compactions_at_once_lose_nothing(journal: Journal) -> None:
    """While one merges, another merges the same parts: all is said, perhaps twice."""
    fill(journal)
    before, parts = said(journal), journal.parts()
    quiet = Journal(journal.folder.removeprefix("watched://"))
    with failing(lambda path: _compact_all(quiet)):
        compact(journal, "second", parts)
    assert said(journal) == before
    assert {part.run for part in journal.parts()} == {"second", "other"}


def _compact_all(journal: Journal) -> None:
    compact(journal, "other", journal.parts())


def test_groups_bound_what_is_in_memory(journal: Journal) -> None:
    """Parts are merged until the next one would be too much, by entries and by bytes."""
    for start in range(0, 60, 10):
        journal.write("r", [outcome(index, 5) for index in range(start, start + 10)])
    result = compact(journal, "s", journal.parts(), merge_entries=30)
    assert (result.read, result.written) == (6, 2)
    assert compact(journal, "s", journal.parts(), merge_entries=50) == CompactionResult(), "two full ones stay"
    assert compact(journal, "s", journal.parts(), merge_bytes=1).written == 0


def part(name: str, run: str = "r", size: int = 1 << 20, age: float = 7200.0) -> Part:
    """A part that only a plan looks at."""
    return Part(f"file:///j/run={run}/{name}.parquet", run, size, NOW - age)


def batches(parts: Iterable[Part], *ended: str, seconds: float = 3600.0) -> list[tuple[Part, ...]]:
    """The batches of the parts of ended runs."""
    return compaction_batches(parts, ended=set(ended), now=NOW, compact_seconds=seconds)


def test_batches_hold_old_parts_of_ended_runs_only() -> None:
    """Young parts, parts of runs that go on and parts that are full stay out; one alone is no batch."""
    old, older = part("a"), part("b", age=9999.0)
    others = [part("c", run="alive"), part("d", age=3599.0), part("e", size=FULL_BYTES)]
    assert batches([older, *others, old], "r") == [(old, older)]
    assert batches([old, *others], "r") == []
    assert batches([part("d", age=0.0), part("f", age=0.0)], "r", seconds=0.0) != []


def test_batches_are_bounded_and_hold_each_part_once() -> None:
    """At most 64 MiB each, in the order of names, whatever the order of the listing."""
    parts = [part(f"{index:04d}", size=(1 + index % 7) << 20) for index in range(500)]
    found = batches(reversed(parts), "r")
    assert [member for batch in found for member in batch] == parts
    assert all(sum(member.size for member in batch) <= BATCH_BYTES for batch in found)
    assert len(found) <= 1 + 2 * sum(member.size for member in parts) // BATCH_BYTES


def test_a_run_has_ended_when_it_has_a_report_or_is_silent_for_an_hour() -> None:
    """Progress and parts are signs of life; the youngest counts."""
    parts = [part("a", "reported", age=1.0), part("b", "working", age=3599.0), part("c", "working", age=9999.0),
             part("d", "silent", age=3601.0), part("e", "computing", age=9999.0)]
    seen = {"computing": NOW - 10.0, "silent": NOW - 5000.0, "gone without parts": NOW - 5000.0, "new": NOW}
    assert ended_runs(parts, finished={"reported"}, seen=seen, now=NOW) == {"reported", "silent", "gone without parts"}


def test_ten_million_rows_become_few_parts() -> None:
    """The 20,000 parts at most that a run of 10 million rows leaves become under 200 at 500 tokens a row."""
    entries = 10_000_000
    size = 4 * 500 * 2 + 700
    merged = max(entries / MERGE_ENTRIES, entries * size / MERGE_BYTES)
    assert merged < 200
    assert PART_ENTRIES * 32 == MERGE_ENTRIES
    assert BATCH_BYTES + 2 * MERGE_BYTES < 1 << 30, "what a worker holds while it merges"
