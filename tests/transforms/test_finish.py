"""What `_SUCCESS` covers: the units of this run, all of them and no others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from batchgen_beam.errors import PublishError
from batchgen_beam.records import Fingerprint
from batchgen_beam.storage.run_files import start_run
from batchgen_beam.storage.totals import RunTotals
from batchgen_beam.transforms.finish import FOUND, IN_RUN, ListPublished, SetAside, WriteRun
from tests.support.jobs import published
from tests.support.storing import noon, run_storage, write_table


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Two files of 6 rows, in units of 2; the last row of the first file asks nothing and fails."""
    for name in "ab":
        prompts = [f"{name}{index}" for index in range(6)]
        write_table(tmp_path / f"{name}.parquet", {
            "uuid": prompts, "prompt": [None if text == "a5" else text for text in prompts]})
    return tmp_path


def run(inputs: Path, names: Sequence[str], **options: Any) -> dict[str, Any]:
    """The job over the named files."""
    return run_storage([inputs / f"{name}.parquet" for name in names], inputs / "out", unit_rows=2, **options)


def found(inputs: Path) -> list[str]:
    """Ids in results/ and failures/, which are to be those of the latest run."""
    out = inputs / "out"
    return sorted(row["uuid"] for kind in ("results", "failures") for row in published(out, kind))


def names(*wanted: tuple[str, int]) -> list[str]:
    """Ids a0, a1, ... of so many rows of each file."""
    return [f"{name}{index}" for name, count in wanted for index in range(count)]


def test_a_smaller_limit_leaves_no_older_rows(inputs: Path) -> None:
    """Units over the limit are set aside and counted, the one that the limit cuts is replaced; then all come back."""
    assert run(inputs, "ab")["stale_units"] == 0
    counts = run(inputs, "ab", limit=7, run="run-2")
    assert (counts["rows"], counts["stale_units"]) == (7, 2)
    assert found(inputs) == names(("a", 6), ("b", 1))
    stale = [path for path in (inputs / "out" / "_stale").rglob("*") if path.is_file()]
    assert [path.relative_to(inputs / "out" / "_stale").parts[:2] for path in stale] == [("run-2", "results")] * 2
    assert run(inputs, "ab", run="run-3")["stale_units"] == 0
    assert found(inputs) == names(("a", 6), ("b", 6))


def test_a_removed_file_leaves_no_older_rows(inputs: Path) -> None:
    """Results and failures of a file that is no input any more are set aside, a unit counted once."""
    run(inputs, "ab")
    assert run(inputs, "b", run="run-2")["stale_units"] == 3
    assert found(inputs) == names(("b", 6))
    assert len(published(inputs / "out" / "_stale" / "run-2")) == 5
    assert len(published(inputs / "out" / "_stale" / "run-2", "failures")) == 1


def test_a_run_without_rows_sets_all_aside(inputs: Path) -> None:
    """No unit at all is a run too."""
    run(inputs, "b")
    write_table(inputs / "c.parquet", {"uuid": [], "prompt": []})
    assert run(inputs, "c", run="run-2")["stale_units"] == 3
    assert found(inputs) == []


def test_a_retried_stage_counts_the_same(inputs: Path) -> None:
    """What an earlier attempt of the run set aside is found again and counted again, and nothing else moves."""
    run(inputs, "a")
    out = str(inputs / "out")
    lister, mover = ListPublished(out, "run-2"), SetAside(out, "run-2")
    before = list(lister.process(RunTotals()))
    assert len(before) == 3
    for _ in range(2):
        (name, mark), *_rest = lister.process(RunTotals())
        assert list(mover.process((name, [mark]))) == [RunTotals(stale_units=1)]
    assert sorted(lister.process(RunTotals())) == before


def test_a_unit_that_another_run_took_away_stops_this_one(inputs: Path) -> None:
    """A unit of this run is never moved; if its files are gone, `_SUCCESS` would lie, and the unit is named."""
    run(inputs, "a")
    out = str(inputs / "out")
    name, _ = next(iter(ListPublished(out, "x").process(RunTotals())))
    mover = SetAside(out, "x")
    assert list(mover.process((name, [IN_RUN, FOUND]))) == []
    assert list(mover.process((name, [IN_RUN]))) == [], "a listing may lag behind"
    list(SetAside(out, "y").process((name, [FOUND])))
    with pytest.raises(PublishError, match=r"unit .*rg-000000-s-0000\.parquet was published and is gone"):
        list(mover.process((name, [IN_RUN])))


def test_a_run_whose_folder_was_claimed_by_another_stops(inputs: Path) -> None:
    """Under other content: before any unit is set aside, and again before the reports."""
    out = str(inputs / "out")
    mine, other = (Fingerprint.of({"model": name}) for name in ("mine", "other"))
    start_run(out, mine)
    list(ListPublished(out, "x", mine.digest).process(RunTotals()))
    start_run(out, other, new_fingerprint=True)
    for step in (ListPublished(out, "x", mine.digest), WriteRun(out, "x", {}, noon, mine.digest)):
        (inputs / "out" / "_SUCCESS").touch()
        with pytest.raises(PublishError, match=r"another run has begun in .* under other content"):
            list(step.process(RunTotals()))
        assert not (inputs / "out" / "_SUCCESS").exists(), "units of the other may have been replaced"
