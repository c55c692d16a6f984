"""What an engine has done and how full it is.  Plain numbers, no behaviour beyond sums."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    """Sums since the engine was built."""

    rows_done: int = 0
    failures: dict[ErrorCode, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    recomputed_tokens: int = 0
    holds: int = 0
    evictions: int = 0
    steps: int = 0
    row_steps: int = 0
    busy_seconds: float = 0.0
    events: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A reading: the sums, and what is on the device now.  `fill` is the mean share of `capacity` that ran."""

    rows_done: int
    rows_failed: int
    failures: dict[ErrorCode, int]
    queued: int
    active: int
    waiting: int
    capacity: int
    prompt_tokens: int
    generated_tokens: int
    prefilled_tokens: int
    recomputed_tokens: int
    holds: int
    evictions: int
    pages_used: int
    pages_total: int
    steps: int
    forward_calls: int
    busy_seconds: float
    events: int
    fill: float
