"""The files that say what an output folder is, and the counts in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchgen_beam.errors import ErrorCode, OutputError
from batchgen_beam.records import Failure, Fingerprint, OutputUnit, RowKey
from batchgen_beam.storage.published import PublishedUnit, publish_unit
from batchgen_beam.storage.run_files import (
    finish_run,
    read_fingerprint,
    read_report,
    run_report,
    start_run,
    write_engine_figures,
)
from batchgen_beam.storage.totals import RunTotals
from batchgen_beam.storage.units import PlacedAnswer
from tests.support.storing import outcome

OURS = Fingerprint.of({"model": "m", "dtype": "bfloat16"})
THEIRS = Fingerprint.of({"model": "m", "dtype": "float32"})


def test_a_run_claims_its_folder(tmp_path: Path) -> None:
    """The first run writes its print; the same print goes on and takes `_SUCCESS` away until it is done."""
    start_run(str(tmp_path), OURS)
    assert read_fingerprint(str(tmp_path)) == OURS
    (tmp_path / "_SUCCESS").touch()
    start_run(str(tmp_path), OURS)
    assert not (tmp_path / "_SUCCESS").exists()


def test_other_content_is_refused_with_its_differences(tmp_path: Path) -> None:
    """Another print is refused by the facts that differ and the remedy, and nothing is touched."""
    start_run(str(tmp_path), THEIRS)
    (tmp_path / "_SUCCESS").touch()
    with pytest.raises(OutputError, match=r"dtype: float32 -> bfloat16\n.*--new-fingerprint") as refusal:
        start_run(str(tmp_path), OURS)
    assert "model" not in str(refusal.value)
    assert (tmp_path / "_SUCCESS").exists()
    assert read_fingerprint(str(tmp_path)) == THEIRS


def test_a_new_fingerprint_replaces_answers(tmp_path: Path) -> None:
    """`new_fingerprint` removes what other content published, so that no file of it stays under `_SUCCESS`."""
    start_run(str(tmp_path), THEIRS)
    place = PlacedAnswer(row=0, rank=0, occurrence=0, answers=(outcome(RowKey("x", "d")),))
    publish_unit(str(tmp_path), PublishedUnit(unit=OutputUnit("file:///a", 0, 0), model="m", placed=[place]))
    start_run(str(tmp_path), THEIRS, new_fingerprint=True)
    assert list(tmp_path.rglob("*.parquet")), "the same print keeps what it has"
    start_run(str(tmp_path), OURS, new_fingerprint=True)
    assert list(tmp_path.rglob("*.parquet")) == []
    assert read_fingerprint(str(tmp_path)) == OURS


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"facts": 3}'])
def test_a_damaged_print_is_named(tmp_path: Path, text: str) -> None:
    """A print that can't be read is refused by name, never taken for none."""
    (tmp_path / "fingerprint.json").write_text(text)
    with pytest.raises(OutputError, match=r"fingerprint\.json is damaged"):
        start_run(str(tmp_path), OURS)


def test_a_folder_in_the_place_of_the_print_is_named(tmp_path: Path) -> None:
    """What can't be read as a file is refused like what is damaged."""
    (tmp_path / "fingerprint.json").mkdir()
    with pytest.raises(OutputError, match=r"fingerprint\.json is damaged"):
        start_run(str(tmp_path), OURS)


def test_the_report_of_a_run(tmp_path: Path) -> None:
    """`run.json` and `_runs/<run>.json` say the same, `_SUCCESS` names the run; the keys are frozen."""
    totals = RunTotals(units=1, rows=3, results=2, failures={"EMPTY_PROMPT": 1})
    finish_run(str(tmp_path), run_report("r", {"model": "m"}, totals))
    report = json.loads((tmp_path / "run.json").read_text())
    assert report == json.loads((tmp_path / "_runs" / "r.json").read_text())
    assert (tmp_path / "_SUCCESS").read_text() == "r\n"
    assert report == {"version": 1, "run": "r", "model": "m", "counts": {
        "units": 1, "rows": 3, "results": 2, "failures": {"EMPTY_PROMPT": 1}, "finish_reasons": {}, "prompt_tokens": 0,
        "cached_tokens": 0, "completion_tokens": 0, "collapsed": 0, "conflicts": 0, "repeated_ids": 0,
        "repeated_id_rows": 0, "stale_units": 0, "skipped_units": 0, "skipped_rows": 0, "reused": 0, "resumed": 0,
        "journal_problems": 0, "failed": 1}}


def test_engine_figures_leave_the_reports_alone(tmp_path: Path) -> None:
    """What the launcher adds after the end has a file of its own: a newer run's report is never replaced."""
    for run in ("old", "new"):
        finish_run(str(tmp_path), run_report(run, {}, RunTotals()))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    write_engine_figures(str(tmp_path), "old", {"steps": 3})
    assert {path: path.read_bytes() for path in before} == before
    assert json.loads((tmp_path / "_runs" / "old.engine.json").read_text()) == {"steps": 3}
    assert read_report(str(tmp_path), "old")["run"] == "old"
    assert json.loads((tmp_path / "run.json").read_text())["run"] == "new"


def test_an_unreachable_output_is_refused() -> None:
    """An output whose store can't be opened here is the user's mistake, with the remedy."""
    with pytest.raises(OutputError, match=r"nonsense://out can't be reached: use a local path"):
        start_run("nonsense://out", OURS)


def test_totals_add_up_in_any_order() -> None:
    """Sums of parts are the sum of all, whatever the grouping; nothing adds up to zeros."""
    bad = Failure(key=RowKey("y", "d"), code=ErrorCode.EMPTY_PROMPT, message="")
    places = [PlacedAnswer(row=0, rank=0, occurrence=0, answers=(outcome(RowKey("x", "d")),)),
              PlacedAnswer(row=1, rank=0, occurrence=0, answers=(bad,))]
    parts = [RunTotals.of_unit(2, places), RunTotals.of_unit(1, places[:1]), RunTotals(conflicts=2, collapsed=1),
             RunTotals(repeated_ids=1, repeated_id_rows=3)]
    total = RunTotals.sum(parts)
    assert total == RunTotals.sum([RunTotals.sum(parts[2:]), RunTotals.sum(reversed(parts[:2]))])
    assert total == RunTotals(
        units=2, rows=3, results=2, failures={"EMPTY_PROMPT": 1}, finish_reasons={"stop": 2}, prompt_tokens=14,
        completion_tokens=6, conflicts=2, collapsed=1, repeated_ids=1, repeated_id_rows=3)
    assert total.balanced
    assert not RunTotals.sum([total, RunTotals(rows=1)]).balanced
    assert RunTotals.sum([]) == RunTotals()
