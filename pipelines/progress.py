"""What a user sees while a run goes on: one live line on a terminal, plain lines elsewhere.

Owns the display, the thread that polls the progress files, and what they said over time.  Does not know how they are
written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TextIO

from batchgen_beam.pipelines.timeline import Timeline
from batchgen_beam.transforms.progress_files import ProgressSample, read_samples, total

__all__ = ["ProgressDisplay", "ProgressReading", "progress_line"]

LIVE_SECONDS = 1.0
"""A terminal's line is renewed this often; plain lines come as often as the workers report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressReading:
    """All processes at one moment, and their mean speed since the engines could work.  `rows` None: not known.

    Speeds are of what this run computes.
    """

    sample: ProgressSample
    rows: int | None
    tokens_per_second: float
    rows_per_second: float


def progress_line(reading: ProgressReading) -> str:
    """One line: rows, tokens per second, batch fill, time left, failures by code.

    A stage that a cluster runs again counts its rows again: never more are told than there are.
    """
    sample = reading.sample
    rows = f"{sample.done} rows" if reading.rows is None else f"{min(sample.done, reading.rows)}/{reading.rows} rows"
    engine = sample.engine
    running = f"running {engine.active}/{engine.capacity}" if sample.engines else "no model loaded"
    parts = [rows, f"{reading.tokens_per_second:.0f} tokens/s", running, f"mean fill {100 * sample.fill:.0f} %"]
    if sample.reused:
        parts.insert(1, f"{sample.reused} from earlier runs")
    if reading.rows is not None and reading.rows_per_second > 0 and sample.done < reading.rows:
        parts.append(f"ETA {_duration((reading.rows - sample.done) / reading.rows_per_second)}")
    if sample.failed:
        parts.append("failed " + " ".join(f"{code} {count}" for code, count in sorted(sample.failed.items())))
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class ProgressDisplay:
    """Polls the progress folder in a thread while it is entered, and shows the last state when it is left."""

    def __init__(self, folder: str, *, rows: int | None, interval: float, stream: TextIO,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._rows = rows
        self._stream = stream
        self._live = stream.isatty()
        self._interval = min(interval, LIVE_SECONDS) if self._live else interval
        self._clock = clock
        self._began = clock()
        self._counts: Mapping[str, Any] | None = None
        self.timeline = Timeline()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batchgen-display", daemon=True)

    def __enter__(self) -> ProgressDisplay:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self._show()
        if self._live:
            self._stream.write("\n")

    def settle(self, counts: Mapping[str, Any]) -> None:
        """The run has ended with these counts of its report.

        Workers count what they compute: equal rows once, rows of a bundle that ran twice more than once.
        """
        self._counts = counts

    def reading(self) -> ProgressReading:
        """The present state; speeds are means over the time since the first engine began to work."""
        sample = total(read_samples(self._folder).samples)
        if self._counts is not None:
            sample = replace(sample, answered=self._counts["results"], failed=dict(self._counts["failures"]), reused=0)
        seconds = max(sample.elapsed_seconds - sample.load_seconds / max(sample.engines, 1), 1e-9)
        return ProgressReading(sample=sample, rows=self._rows,
                               tokens_per_second=sample.engine.generated_tokens / seconds,
                               rows_per_second=sample.computed / seconds)

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._show()

    def _show(self) -> None:
        reading = self.reading()
        self.timeline.add(self._clock() - self._began, reading.sample)
        line = progress_line(reading)
        if self._live:
            self._stream.write(f"\r\x1b[2K{line}")
        else:
            self._stream.write(f"[{_duration(self._clock() - self._began)}] {line}\n")
        self._stream.flush()
