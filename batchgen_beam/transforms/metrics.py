"""What is counted about rows: Beam metrics, whose names are frozen by a contract test, and the process's own tally.

Both count attempts: a bundle that runs twice is counted twice.  The counts of a run come from its collections.
Does not know the engine's internals or files.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping

from apache_beam.metrics import Metrics

from batchgen_beam.engine.migration import Move
from batchgen_beam.errors import ErrorCode
from batchgen_beam.records import Answer, Failure

__all__ = ["ALL_METRICS", "BATCH_FILL", "ENGINE_WORK", "GENERATED_TOKENS", "LOAD_MSECS", "NAMESPACE", "PROMPT_TOKENS",
           "ROWS_ANSWERED", "ROWS_FAILED", "EngineMetrics", "RowMetrics", "Tally", "failure_counter"]

NAMESPACE = "batchgen_beam"

ROWS_ANSWERED = "rows_answered"
ROWS_FAILED = "rows_failed"
PROMPT_TOKENS = "prompt_tokens"
GENERATED_TOKENS = "generated_tokens"
LOAD_MSECS = "model_load_msecs"
"""Distribution: one sample for each engine that was loaded; its count is the number of loads."""
BATCH_FILL = "batch_fill_percent"
"""Distribution: one sample for each lane that was finished, the engine's mean fill so far."""

ENGINE_WORK = ("evictions", "holds", "recomputed_tokens")
"""Counters that are named as in the engine's statistics."""


def failure_counter(code: ErrorCode) -> str:
    """The name of the counter of one failure code."""
    return f"{ROWS_FAILED}_{code.value.lower()}"


ALL_METRICS = (ROWS_ANSWERED, ROWS_FAILED, PROMPT_TOKENS, GENERATED_TOKENS, LOAD_MSECS, BATCH_FILL, *ENGINE_WORK,
               *(failure_counter(code) for code in ErrorCode))


class Tally:
    """Rows that this process has let out, for progress files; any thread may count and read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answered = 0
        self._failed: Counter[str] = Counter()
        self._reused = 0
        self._moves: Counter[str] = Counter()

    @property
    def moves(self) -> dict[str, int]:
        """Rows that left for another round, by the way in which their KV would have moved at least cost."""
        with self._lock:
            return dict(self._moves)

    def move(self, cheaper: Move) -> None:
        """One more row that left."""
        with self._lock:
            self._moves[cheaper.value] += 1

    @property
    def reused(self) -> int:
        """Rows that were done before this run."""
        return self._reused

    def reuse(self, rows: int) -> None:
        """So many more rows whose answers were there already."""
        with self._lock:
            self._reused += rows

    def count(self, answer: Answer) -> None:
        """One more row."""
        with self._lock:
            if isinstance(answer, Failure):
                self._failed[answer.code.value] += 1
            else:
                self._answered += 1

    def read(self) -> tuple[int, dict[str, int]]:
        """Answered rows, and failed rows by code."""
        with self._lock:
            return self._answered, dict(self._failed)


class RowMetrics:
    """The Beam counters of a step whose rows end there."""

    def __init__(self) -> None:
        self._answered = Metrics.counter(NAMESPACE, ROWS_ANSWERED)
        self._failed = Metrics.counter(NAMESPACE, ROWS_FAILED)
        self._prompt_tokens = Metrics.counter(NAMESPACE, PROMPT_TOKENS)
        self._generated_tokens = Metrics.counter(NAMESPACE, GENERATED_TOKENS)
        self._codes = {code: Metrics.counter(NAMESPACE, failure_counter(code)) for code in ErrorCode}

    def count(self, answer: Answer) -> None:
        """One more row; call from a DoFn's own thread."""
        if isinstance(answer, Failure):
            self._failed.inc()
            self._codes[answer.code].inc()
        else:
            self._answered.inc()
            self._prompt_tokens.inc(answer.prompt_tokens)
            self._generated_tokens.inc(answer.completion_tokens)


class EngineMetrics:
    """The Beam metrics of a process's engine, reported by whichever lane comes by; call from a DoFn's own thread."""

    def __init__(self) -> None:
        self._load_msecs = Metrics.distribution(NAMESPACE, LOAD_MSECS)
        self._batch_fill = Metrics.distribution(NAMESPACE, BATCH_FILL)
        self._work = {name: Metrics.counter(NAMESPACE, name) for name in ENGINE_WORK}

    def loads(self, seconds: Iterable[float]) -> None:
        """Engines that were loaded, each in so many seconds."""
        for one in seconds:
            self._load_msecs.update(round(1000 * one))

    def fill(self, share: float) -> None:
        """The mean fill so far, 0 to 1."""
        self._batch_fill.update(round(100 * share))

    def count_work(self, more: Mapping[str, int]) -> None:
        """What has been done since the report before, by the names of `ENGINE_WORK`."""
        for name, count in more.items():
            self._work[name].inc(count)
