"""The stage behind `_SUCCESS`: parts of ended runs become few, whatever the store says."""

from __future__ import annotations

from pathlib import Path

import apache_beam as beam
import pytest

from batchgen_beam.records import RowKey
from batchgen_beam.storage.in_flight import Attempt, InFlightFile
from batchgen_beam.storage.journal import Journal
from batchgen_beam.storage.run_files import finish_run, reported_runs, run_report, write_engine_figures, write_pass
from batchgen_beam.storage.totals import RunTotals
from batchgen_beam.transforms.compact import CompactJournal
from batchgen_beam.transforms.progress_files import last_seen
from tests.support.storing import local_pipeline, noon, outcome


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Two parts each of a run that has ended and of one that goes on, and rows in flight of both."""
    journal = Journal.of(str(tmp_path), "content")
    for index, run in enumerate(("ended", "ended", "alive", "alive")):
        journal.write(run, [outcome(RowKey(f"row-{index}", "d"))])
    for run in ("ended", "alive"):
        InFlightFile(journal, run, "p").write({"x": Attempt()})
    finish_run(str(tmp_path), run_report("ended", {}, RunTotals()))
    return journal


def compact(output: Path, journal: Journal, seconds: float) -> None:
    """The stage, at the end of run `ended`."""
    with local_pipeline() as pipeline:
        _ = pipeline | beam.Create([RunTotals()]) | CompactJournal(str(output), journal, "ended",
                                                                   compact_seconds=seconds, clock=noon)


def in_flight(output: Path, run: str) -> bool:
    """Whether the run has rows in flight."""
    return any((output / "_journal").rglob(f"run={run}/in-flight-*"))


def test_parts_of_ended_runs_are_merged(tmp_path: Path, journal: Journal) -> None:
    """Two parts become one with the rows of both, rows in flight are forgotten; a run that goes on keeps all it has."""
    alive = [part for part in journal.parts() if part.run == "alive"]
    compact(tmp_path, journal, -1e12)
    parts = journal.parts()
    assert [part for part in parts if part.run == "alive"] == alive
    [merged] = [part for part in parts if part.run == "ended"]
    assert sorted(entry.key.uuid for entry in journal.entries(merged).entries) == ["row-0", "row-1"]
    assert (in_flight(tmp_path, "ended"), in_flight(tmp_path, "alive")) == (False, True)


def test_young_parts_stay(tmp_path: Path, journal: Journal) -> None:
    """Nothing is merged before its time."""
    before = journal.parts()
    compact(tmp_path, journal, 3600)
    assert journal.parts() == before


def test_a_store_that_refuses_leaves_the_run_ended(tmp_path: Path, journal: Journal) -> None:
    """What can't be listed is not merged, and no error stops a run whose answers are published."""
    progress = tmp_path / "_progress"
    progress.write_text("a file where a folder should be")
    (tmp_path / "_runs").rename(tmp_path / "gone")
    (tmp_path / "_runs").write_text("another")
    compact(tmp_path, journal, -1e12)
    assert len(journal.parts()) == 4


def test_only_a_report_says_that_a_run_has_ended(tmp_path: Path) -> None:
    """What its passes and its engines did is stored before or beside it."""
    write_pass(str(tmp_path), "one", 1, RunTotals())
    write_engine_figures(str(tmp_path), "one", {})
    assert reported_runs(str(tmp_path)) == set()
    finish_run(str(tmp_path), run_report("one", {}, RunTotals()))
    assert reported_runs(str(tmp_path)) == {"one"}


def test_the_latest_sample_says_when_a_run_was_seen(tmp_path: Path) -> None:
    """Of all its processes."""
    for run, process in (("a", "p"), ("a", "q"), ("b", "p")):
        path = tmp_path / "_progress" / run / f"{process}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    seen = last_seen(str(tmp_path))
    latest = max(path.stat().st_mtime for path in (tmp_path / "_progress" / "a").iterdir())
    assert seen.keys() == {"a", "b"}
    assert abs(seen["a"] - latest) < 1
