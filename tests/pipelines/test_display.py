"""Laws of what a user reads: one line of progress, and a summary that balances."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest

from batchgen_beam.engine.stats import EngineStats
from batchgen_beam.pipelines.progress import ProgressDisplay, ProgressReading, progress_line
from batchgen_beam.pipelines.summary import show_summary
from batchgen_beam.pipelines.timeline import POINTS, Timeline
from batchgen_beam.storage.files import write_atomically
from batchgen_beam.transforms.progress_files import ProgressSample

ENGINE = EngineStats(queued=0, active=7, waiting=0, capacity=8, pages_used=1, pages_total=9, forward_calls=1,
                     generated_tokens=900)
SAMPLE = ProgressSample(process="p", answered=30, failed={"INVALID_ROW": 2, "EMPTY_PROMPT": 1}, engine=ENGINE,
                        fill=0.5, engines=1, elapsed_seconds=12, load_seconds=2)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _reading(rows: int | None, sample: ProgressSample = SAMPLE) -> ProgressReading:
    return ProgressReading(sample=sample, rows=rows, tokens_per_second=90.0, rows_per_second=3.0)


def test_a_line_says_rows_speed_fill_time_left_and_failures() -> None:
    """Failures by code in a fixed order; the time left from the speed so far."""
    assert progress_line(_reading(393)) == (
        "33/393 rows, 90 tokens/s, running 7/8, mean fill 50 %, ETA 2 min 00 s, failed EMPTY_PROMPT 1 INVALID_ROW 2")


def test_nothing_is_promised_that_is_not_known() -> None:
    """No time left without a row count, none at the end; before an engine is there, that is said."""
    assert "ETA" not in progress_line(_reading(None))
    assert "ETA" not in progress_line(_reading(33))
    assert "no model loaded" in progress_line(_reading(None, ProgressSample(process="p")))


def test_a_stage_that_ran_twice_does_not_show_more_rows_than_there_are() -> None:
    """The processes of both attempts are counted."""
    assert progress_line(_reading(30)).startswith("30/30 rows, ")


def test_speed_counts_from_the_moment_the_engine_could_work(tmp_path: Path) -> None:
    """Time spent loading the model is no time of generation."""
    write_atomically(f"{tmp_path}/p.json", replace(SAMPLE, failed={}).to_json())
    reading = ProgressDisplay(str(tmp_path), rows=60, interval=9, stream=io.StringIO()).reading()
    assert (reading.tokens_per_second, reading.rows_per_second) == (90.0, 3.0)


def test_a_terminal_gets_one_line_others_get_lines(tmp_path: Path) -> None:
    """The live line is overwritten; a log gets plain lines with the time."""
    for stream, pieces in ((_Terminal(), ("\r\x1b[2K0/5 rows", "\n")), (io.StringIO(), ("[0 s] 0/5 rows", "\n"))):
        with ProgressDisplay(str(tmp_path), rows=5, interval=60, stream=stream):
            pass
        assert stream.getvalue().startswith(pieces[0])
        assert stream.getvalue().endswith(pieces[1])
        assert stream.getvalue().count("\n") == 1


def test_the_last_line_has_the_counts_of_the_report(tmp_path: Path) -> None:
    """Workers compute equal rows once: only the report knows that every row has its answer."""
    write_atomically(f"{tmp_path}/p.json", SAMPLE.to_json())
    stream = io.StringIO()
    with ProgressDisplay(str(tmp_path), rows=40, interval=60, stream=stream) as display:
        assert "ETA" in progress_line(display.reading())
        display.settle({"results": 37, "failures": {"INVALID_ROW": 3}})
    assert "40/40 rows" in stream.getvalue()
    assert "ETA" not in stream.getvalue()


def test_rows_of_earlier_runs_count_as_done_but_not_as_speed(tmp_path: Path) -> None:
    """33 rows in 10 seconds, and 300 that were there: the time left is that of the rest at the speed of computing."""
    write_atomically(f"{tmp_path}/p.json", replace(SAMPLE, reused=300).to_json())
    reading = ProgressDisplay(str(tmp_path), rows=399, interval=9, stream=io.StringIO()).reading()
    assert (reading.tokens_per_second, reading.rows_per_second) == (90.0, 3.3)
    assert progress_line(reading).startswith("333/399 rows, 300 from earlier runs, 90 tokens/s, running 7/8")
    assert "ETA 20 s" in progress_line(reading)


def test_a_timeline_is_short_whatever_the_readings() -> None:
    """At most 20 points; each says the fill since the one before, the last is the end."""
    timeline = Timeline()
    assert timeline.as_facts() == []
    for second in range(1, 1000):
        rows = 8 * min(second, 500) + 4 * max(0, second - 500)
        engine = replace(ENGINE, steps=second, row_steps=rows, generated_tokens=rows)
        timeline.add(second, replace(SAMPLE, engine=engine))
    facts = timeline.as_facts()
    assert 8 < len(facts) <= POINTS
    assert (facts[0]["batch_fill"], facts[-1]["batch_fill"]) == (1.0, 0.5)
    assert (facts[-1]["seconds"], facts[-1]["rows"]) == (999, 33)


@pytest.mark.parametrize(("restarts", "told"), [
    ({}, ["9 rows went on where an earlier run had left them"]),
    ({"numeric_print": 4}, ["5 rows went on where an earlier run had left them",
                            "4 rows began again: an earlier run left them to other kernels, whose bits are others"]),
    ({"numeric_print": 9}, ["9 rows began again: an earlier run left them to other kernels, whose bits are others"]),
])
def test_rows_that_could_not_go_on_are_not_told_as_resumed(restarts: dict[str, int], told: list[str],
                                                           tmp_path: Path) -> None:
    """A state that other kernels computed is not gone on with, and the summary says so."""
    counts = dict.fromkeys(("rows", "results", "failed", "skipped_rows", "skipped_units", "reused", "repeated_ids",
                            "conflicts", "journal_problems", "stale_units", "prompt_tokens", "completion_tokens"), 0)
    report = {"counts": {**counts, "resumed": 9, "failures": {}, "finish_reasons": {}}}
    figures = ProgressSample(process="all")
    figures.engine.restarts.update(restarts)
    stream = io.StringIO()
    show_summary(report, figures, output=str(tmp_path), stream=stream)
    assert [line for line in stream.getvalue().splitlines() if " went on " in line or " began again" in line] == told
