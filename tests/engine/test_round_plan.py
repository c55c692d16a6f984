"""The plan of a round is a pure function of keys and numbers: balance, purity, and the law of expected lengths."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen_beam.engine.round_plan import LENGTH_SCALE, expected_remaining, plan_round

ROWS = st.dictionaries(st.text("abc", min_size=1, max_size=5), st.integers(1, 5000), max_size=60)
LAWS = settings(max_examples=200, deadline=None, derandomize=True)


@LAWS
@given(ROWS, st.integers(1, 12))
def test_no_lane_is_over_its_share_by_more_than_one_row(rows: dict[str, int], lanes: int) -> None:
    """Every key has one lane; what a lane has beyond an even share is less than one of its own rows."""
    plan = plan_round(rows.items(), lanes)
    assert plan.keys() == rows.keys()
    for lane in range(lanes):
        loads = [rows[key] for key, chosen in plan.items() if chosen == lane]
        assert sum(loads) <= sum(rows.values()) / lanes + max(loads, default=0)
    assert set(plan.values()) <= set(range(lanes))
    assert len(set(plan.values())) == min(lanes, len(rows))


@LAWS
@given(ROWS, st.integers(1, 12), st.randoms(use_true_random=False))
def test_plan_does_not_depend_on_the_order_of_rows(rows: dict[str, int], lanes: int, shuffle: random.Random) -> None:
    """Runners give the rows in any order, some of them twice; the plan is the same."""
    mixed = [*rows.items(), *shuffle.sample(sorted(rows.items()), len(rows) // 2)]
    shuffle.shuffle(mixed)
    assert plan_round(mixed, lanes) == plan_round(sorted(rows.items()), lanes)


def test_longest_row_goes_first_and_ties_go_to_the_least() -> None:
    """Equal rows are dealt by key; a key of two lengths counts as its longer one."""
    assert plan_round([("b", 5), ("a", 5), ("c", 9), ("d", 4)], 2) == {"c": 0, "a": 1, "b": 1, "d": 0}
    assert plan_round([("a", 1), ("b", 5), ("a", 7)], 2) == {"a": 0, "b": 1}


@LAWS
@given(st.integers(1, 4000), st.integers(0, 4000), st.integers(1, 8000) | st.none())
def test_expected_length_is_bounded_and_grows_with_the_row(prompt: int, generated: int, max_tokens: int | None) -> None:
    """At least 1, at most the room that max_tokens and the context leave, and under what was said so far and c."""
    limit = 8192
    room = min(limit - prompt - generated, limit if max_tokens is None else max_tokens - generated)
    expected = expected_remaining(prompt=prompt, generated=generated, max_tokens=max_tokens, context_limit=limit)
    assert 1 <= expected <= max(1, min(room, LENGTH_SCALE + generated))


def test_expected_length_under_far_and_near_limits() -> None:
    """Far limits: as much again as was said, and c.  Near ones: what they leave."""
    def expected(generated: int, max_tokens: int | None) -> int:
        return expected_remaining(prompt=10, generated=generated, max_tokens=max_tokens, context_limit=10**9)

    assert expected(1000, None) == 1000 + LENGTH_SCALE
    assert expected(0, None) == LENGTH_SCALE
    assert expected(1000, 1010) == 10
    assert expected(936, 936 + 1000) == 500


def test_expected_length_is_the_mean_of_its_law() -> None:
    """The closed form equals the mean of sampled Lomax lengths, given survival and cut off at the room."""
    draw = random.Random(7)
    generated, room = 200, 600
    lived = LENGTH_SCALE + generated
    sampled = [min(room, lived * (draw.random() ** -0.5 - 1)) for _ in range(200_000)]
    expected = expected_remaining(prompt=10, generated=generated, max_tokens=generated + room, context_limit=10**6)
    assert abs(sum(sampled) / len(sampled) - expected) < 2
