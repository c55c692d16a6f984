"""How full the engines were over time, from the readings of one run.

Owns the thinning to few points.  Pure: does not know where readings come from.
"""

from __future__ import annotations

from batchgen_beam.transforms.progress_files import ProgressSample

__all__ = ["POINTS", "Timeline"]

POINTS = 20


class Timeline:
    """At most `POINTS` readings, evenly spread over all that were added; the latest is always among them."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, ProgressSample]] = []
        self._latest: tuple[float, ProgressSample] | None = None
        self._stride = 1
        self._added = 0

    def add(self, seconds: float, sample: ProgressSample) -> None:
        """One more reading, `seconds` after the beginning."""
        self._latest = seconds, sample
        self._added += 1
        if self._added % self._stride == 0:
            self._kept.append(self._latest)
        if len(self._kept) == POINTS:
            self._kept = self._kept[1::2]
            self._stride *= 2

    def as_facts(self) -> list[dict[str, object]]:
        """Seconds, finished rows and generated tokens so far, and the batch fill since the point before."""
        points = list(self._kept)
        if self._latest is not None and self._latest not in points[-1:]:
            points.append(self._latest)
        facts: list[dict[str, object]] = []
        before = ProgressSample(process="")
        for seconds, sample in points:
            facts.append({"seconds": round(seconds, 1), "rows": sample.done,
                          "generated_tokens": sample.engine.generated_tokens,
                          "batch_fill": round(_fill_between(before, sample), 3)})
            before = sample
        return facts


def _fill_between(before: ProgressSample, now: ProgressSample) -> float:
    """Rows that ran, over slots that could have; engines are alike, so each has its part of the capacity."""
    steps = now.engine.steps - before.engine.steps
    rows = now.engine.row_steps - before.engine.row_steps
    capacity = now.engine.capacity / max(now.engines, 1)
    return rows / (steps * capacity) if steps > 0 and capacity else 0.0
