"""Laws of the tail rule: nothing moves without a gain, and what moves goes the way that ends soonest."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from batchgen_beam.engine.tail_rule import StepCost, Tail, TailChoice, TailPlan, plan_tail, seconds_left

COST = StepCost(weights=10e-3, row=1e-3, fixed=1e-3, gather=50e-6, gathers=30, move=0.5)
TAIL = Tail(rows=1, tokens=1000, may_refill=False, idle=3)
STAY = TailPlan(choice=TailChoice.STAY, workers=1)


def situations(count: int) -> list[tuple[Tail, StepCost]]:
    """Random tails and costs, over the sizes at which the choice changes."""
    draw = random.Random(1)
    return [(Tail(rows=draw.choice((0, 1, 1, 2, 3, 9)), tokens=draw.choice((1, 30, 300, 3000)), may_refill=False,
                  idle=draw.randrange(6)),
             StepCost(weights=draw.uniform(0, 2e-2), row=draw.uniform(0, 2e-2), fixed=draw.uniform(0, 2e-3),
                      gather=draw.choice((1e-6, 1e-4, 1e-3)), gathers=draw.choice((0, 30, 150)),
                      move=draw.choice((0.0, 0.1, 5.0)))) for _ in range(2000)]


@pytest.mark.parametrize(("tail", "cost", "plan"), [
    (TAIL, COST, TailPlan(choice=TailChoice.SPLIT, workers=3)),
    (replace(TAIL, tokens=150), COST, TailPlan(choice=TailChoice.SPLIT, workers=3)),
    (replace(TAIL, tokens=100), COST, STAY),
    (replace(TAIL, idle=1), COST, TailPlan(choice=TailChoice.SPLIT, workers=2)),
    (TAIL, replace(COST, gather=400e-6), STAY),
    (replace(TAIL, rows=8), COST, TailPlan(choice=TailChoice.SPREAD, workers=4)),
    (replace(TAIL, rows=2), COST, TailPlan(choice=TailChoice.SPREAD, workers=2)),
    (replace(TAIL, rows=2), replace(COST, row=0.0), STAY),
    (replace(TAIL, may_refill=True), COST, STAY),
    (replace(TAIL, idle=0), COST, STAY),
    (replace(TAIL, rows=0), COST, STAY),
])
def test_known_cases(tail: Tail, cost: StepCost, plan: TailPlan) -> None:
    """Worked out by hand: 12 s stay; split over 2, 3, 4 they are 8.5, 8.17 and 8.75 s."""
    assert plan_tail(tail, cost) == plan


def test_no_allowed_plan_ends_sooner() -> None:
    """Of all plans for these rows and workers none ends sooner, and none of fewer workers as soon."""
    for tail, cost in situations(2000):
        plan, choice = plan_tail(tail, cost), TailChoice.SPLIT if tail.rows == 1 else TailChoice.SPREAD
        for workers in range(2, 2 + tail.idle):
            other = TailPlan(choice=choice, workers=workers)
            if tail.rows and workers <= (tail.rows if tail.rows > 1 else workers):
                assert seconds_left(tail, cost, plan) <= seconds_left(tail, cost, other)
                assert workers >= plan.workers or seconds_left(tail, cost, plan) < seconds_left(tail, cost, other)
        assert seconds_left(tail, cost, plan) <= seconds_left(tail, cost, STAY)
        assert plan.workers <= 1 + tail.idle


def test_one_row_is_split_and_several_are_spread() -> None:
    """No split of several rows, no spreading of one, and never more workers than rows to spread."""
    found = set()
    for tail, cost in situations(2000):
        plan = plan_tail(tail, cost)
        found.add((min(tail.rows, 2), plan.choice))
        assert plan.choice is not TailChoice.SPREAD or plan.workers <= tail.rows
    assert found == {(0, TailChoice.STAY), (1, TailChoice.STAY), (1, TailChoice.SPLIT), (2, TailChoice.STAY),
                     (2, TailChoice.SPREAD)}


def test_nothing_moves_while_places_are_refilled() -> None:
    """While a freed place may be filled again, the batch stays whatever it costs."""
    assert all(plan_tail(replace(tail, may_refill=True), cost) == STAY for tail, cost in situations(500))


def test_the_choice_is_monotone() -> None:
    """What stays does so too with dearer gatherings or moves, or less to say; an idle worker more delays nothing."""
    for tail, cost in situations(2000):
        plan = plan_tail(tail, cost)
        if plan == STAY:
            assert plan_tail(tail, replace(cost, gather=2 * cost.gather)) == STAY
            assert plan_tail(tail, replace(cost, move=cost.move + 1)) == STAY
            assert plan_tail(replace(tail, tokens=max(1, tail.tokens // 2)), cost) == STAY
        more = replace(tail, idle=tail.idle + 1)
        assert seconds_left(more, cost, plan_tail(more, cost)) <= seconds_left(tail, cost, plan)
