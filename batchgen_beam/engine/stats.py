"""What an engine has done and how full it is.  Plain numbers, no behaviour beyond sums."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields, replace
from typing import Any

from batchgen_beam.errors import ErrorCode

__all__ = ["Counters", "EngineFacts", "EngineStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the engine has to know of the tokenizer and the run, without knowing text.

    Ids from `text_vocabulary` on can't be decoded and are never sampled.  The prints are digests.
    """

    eos_ids: frozenset[int]
    text_vocabulary: int
    content_print: str
    numeric_print: str


@dataclass(slots=True, kw_only=True)
class Counters:
    """Sums since the engine was built.

    `cached_tokens` of answered rows were read from pages that other rows had computed.
    `prefilled_tokens` went through the model as prompt chunks, `recomputed_tokens` of them for a second time; of these,
    `resumed_tokens` were computed by another engine before: they belong to the `resumed_rows` that came as records.
    `restarts` counts records that could not go on here, by the print that differed.  `row_steps` sums the rows of all
    steps; `events` counts visits of sequences.  `span_seconds` pass from the first row that is queued to the end of the
    last step, `busy_seconds` of them within steps, whether the rows were answered here or moved.
    """

    rows_done: int = 0
    failures: dict[ErrorCode, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    recomputed_tokens: int = 0
    resumed_rows: int = 0
    resumed_tokens: int = 0
    restarts: dict[str, int] = field(default_factory=dict)
    holds: int = 0
    evictions: int = 0
    steps: int = 0
    row_steps: int = 0
    events: int = 0
    busy_seconds: float = 0.0
    span_seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class EngineStats(Counters):
    """A reading: a copy of the sums, and what is under way now.

    `fed_steps` are the steps during which some lane still had rows to submit, `fed_row_steps` their rows, `lanes_peak`
    the most lanes with rows under way at once; only a driver knows them.  `split_rows` went on in several processes,
    where `split_tokens` were generated; only a `TailEngine` knows them.
    """

    queued: int
    active: int
    waiting: int
    capacity: int
    pages_used: int
    pages_total: int
    forward_calls: int
    fed_steps: int = 0
    fed_row_steps: int = 0
    lanes_peak: int = 0
    split_rows: int = 0
    split_tokens: int = 0

    def with_work_of(self, other: EngineStats) -> EngineStats:
        """Both engines' sums and what both have under way, as one engine's of this capacity and time span."""
        tables: dict[str, Any] = {name: dict(Counter(getattr(self, name)) + Counter(getattr(other, name)))
                                  for name in ("failures", "restarts")}
        kept = {*tables, "span_seconds", "capacity", "pages_total", "lanes_peak"}
        sums = {item.name: getattr(self, item.name) + getattr(other, item.name)
                for item in fields(EngineStats) if item.name not in kept}
        return replace(self, **tables, **sums)

    @property
    def fill(self) -> float:
        """Mean share of the slots that ran in a step."""
        return self.row_steps / (self.steps * self.capacity) if self.steps else 0.0
