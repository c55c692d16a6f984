"""What becomes of a batch's tail: it stays, its rows are spread over idle workers, or its last row is split over them.

A pure function from what is left and measured times to a plan.  Owns the time model; knows no rows, processes, models
or clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["StepCost", "Tail", "TailChoice", "TailPlan", "plan_tail", "seconds_left"]


class TailChoice(StrEnum):
    """What is done with the rows that are left."""

    STAY = "stay"
    SPREAD = "spread"
    SPLIT = "split"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """What is left on one worker: `rows`, of which the one with most to say is expected to generate `tokens` more
    (`round_plan.expected_remaining`).  `may_refill`: other rows wait or may still come.  `idle` other workers have
    nothing to do."""

    rows: int
    tokens: int
    may_refill: bool
    idle: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Measured seconds of a decode step: `weights` whatever the rows, `row` for each row, `fixed` that no splitting
    saves (line by line work, sampling, messages).

    `gather` is one gathering between two processes, of which a step has `gathers`; among n processes it takes n - 1
    times as long, since each sends to every other.  `move` is paid once where rows leave: suspending, loading, and
    prefilling again.
    """

    weights: float
    row: float
    fixed: float
    gather: float
    gathers: int
    move: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TailPlan:
    """`workers` take part, the present one among them."""

    choice: TailChoice
    workers: int


STAY = TailPlan(choice=TailChoice.STAY, workers=1)


def seconds_left(tail: Tail, cost: StepCost, plan: TailPlan) -> float:
    """Until the longest row is done."""
    n = plan.workers
    match plan.choice:
        case TailChoice.STAY:
            return tail.tokens * (cost.fixed + cost.weights + tail.rows * cost.row)
        case TailChoice.SPREAD:
            return cost.move + tail.tokens * (cost.fixed + cost.weights + -(-tail.rows // n) * cost.row)
        case TailChoice.SPLIT:
            gathered = cost.gathers * cost.gather * (n - 1)
            return cost.move + tail.tokens * (cost.fixed + (cost.weights + tail.rows * cost.row) / n + gathered)


def plan_tail(tail: Tail, cost: StepCost) -> TailPlan:
    """The plan that ends soonest, of equal ones the one with fewest workers; nothing moves for no gain.

    Nothing moves either while a freed place may be filled again, or where nobody is idle.  One row is split; several
    are spread, at most a row a worker, which keeps their steps free of gatherings.
    """
    if tail.may_refill or tail.rows == 0:
        return STAY
    choice = TailChoice.SPLIT if tail.rows == 1 else TailChoice.SPREAD
    most = 1 + tail.idle if tail.rows == 1 else min(1 + tail.idle, tail.rows)
    plans = [STAY, *(TailPlan(choice=choice, workers=workers) for workers in range(2, most + 1))]
    return min(plans, key=lambda plan: (seconds_left(tail, cost, plan), plan.workers))
