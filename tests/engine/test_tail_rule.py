"""Laws of the tail rule: nothing moves without a gain, and what moves ends sooner."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from batchgen_beam.engine.tail_rule import Tail, TailChoice, TailCost, plan_tail, seconds_left

STAY, SPLIT = TailChoice.STAY, TailChoice.SPLIT
COST = TailCost(here=12e-3, split=8e-3, prefill=1e-3)
TAIL = Tail(rows=1, tokens=1000, context=500, may_refill=False)


def situations(count: int) -> list[tuple[Tail, TailCost]]:
    """Random last rows and costs, over the sizes at which the choice changes."""
    draw = random.Random(1)
    return [(Tail(rows=1, tokens=draw.choice((1, 30, 300, 3000)), context=draw.choice((2, 60, 700)), may_refill=False),
             TailCost(here=draw.uniform(0, 2e-2), split=draw.uniform(0, 2e-2), prefill=draw.uniform(0, 5e-3)))
            for _ in range(count)]


@pytest.mark.parametrize(("tail", "cost", "choice"), [
    (TAIL, COST, SPLIT),
    (replace(TAIL, tokens=126), COST, SPLIT),
    (replace(TAIL, tokens=125), COST, STAY),
    (replace(TAIL, tokens=124), COST, STAY),
    (TAIL, replace(COST, split=12e-3), STAY),
    (TAIL, replace(COST, prefill=8e-3), STAY),
    (TAIL, TailCost(here=17e-3, split=219e-3, prefill=1e-3), STAY),
    (replace(TAIL, rows=2), COST, STAY),
    (replace(TAIL, rows=0), COST, STAY),
    (replace(TAIL, may_refill=True), COST, STAY),
])
def test_known_cases(tail: Tail, cost: TailCost, choice: TailChoice) -> None:
    """Worked out by hand: 500 tokens are prefilled in 0.5 s, which 125 steps that take 4 ms less make good."""
    assert plan_tail(tail, cost) is choice


def test_the_choice_ends_soonest() -> None:
    """A split ends sooner than staying, and a row that stays would not have ended sooner; both occur."""
    found = set()
    for tail, cost in situations(2000):
        choice = plan_tail(tail, cost)
        found.add(choice)
        gain = seconds_left(tail, cost, STAY) - seconds_left(tail, cost, SPLIT)
        assert (gain > 0) is (choice is SPLIT)
    assert found == set(TailChoice)


def test_nothing_moves_while_places_are_refilled_or_rows_have_company() -> None:
    """Whatever it costs."""
    for tail, cost in situations(500):
        assert plan_tail(replace(tail, may_refill=True), cost) is STAY
        assert plan_tail(replace(tail, rows=2), cost) is STAY


def test_the_choice_is_monotone() -> None:
    """What stays does so too with a slower group, a dearer move, a longer context or less to say."""
    for tail, cost in situations(2000):
        if plan_tail(tail, cost) is STAY:
            assert plan_tail(tail, replace(cost, split=2 * cost.split)) is STAY
            assert plan_tail(tail, replace(cost, prefill=2 * cost.prefill)) is STAY
            assert plan_tail(replace(tail, context=2 * tail.context), cost) is STAY
            assert plan_tail(replace(tail, tokens=max(1, tail.tokens // 2)), cost) is STAY
