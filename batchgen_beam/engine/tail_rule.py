"""What becomes of the last row of a batch: it stays, or it is split over the processes of a group.

A pure function from what is left and measured times to a choice.  Owns the time model; knows no rows, processes, models
or clocks.  Several rows are never split: what spreads them over workers is `round_plan`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Tail", "TailChoice", "TailCost", "TailRule", "plan_tail", "seconds_left"]


class TailChoice(StrEnum):
    """What is done with the row that is left."""

    STAY = "stay"
    SPLIT = "split"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """What is left on one worker: `rows`, of which the one with most to say is expected to generate `tokens` more
    (`round_plan.expected_remaining`) and has `context` tokens so far.  `may_refill`: other rows wait or may still
    come."""

    rows: int
    tokens: int
    context: int
    may_refill: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TailCost:
    """Measured seconds: of one row's decode step in this process (`here`) and in the group (`split`), and of a prompt
    token in the group (`prefill`), which a row that moves pays for each token of its context."""

    here: float
    split: float
    prefill: float


TailRule = Callable[[Tail, TailCost], TailChoice]


def seconds_left(tail: Tail, cost: TailCost, choice: TailChoice) -> float:
    """Until the row is done."""
    if choice is TailChoice.STAY:
        return tail.tokens * cost.here
    return tail.context * cost.prefill + tail.tokens * cost.split


def plan_tail(tail: Tail, cost: TailCost) -> TailChoice:
    """The choice that ends soonest; nothing moves for no gain, nor while a freed place may be filled again."""
    if tail.rows != 1 or tail.may_refill:
        return TailChoice.STAY
    return min(TailChoice, key=lambda choice: seconds_left(tail, cost, choice))
