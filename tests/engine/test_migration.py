"""Move the KV or compute it again: the rule agrees with the two costs that it compares."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen_beam.engine.migration import Move, MoveCosts


def costs(kv_bytes: float = 23_040, prefill: float = 1_000, bandwidth: float = 1.25e9,
          latency: float = 1.0) -> MoveCosts:
    """SmolLM2-135M in bfloat16 (30 layers, 3 heads of 64, K and V), a slow processor, a link of 10 Gbit/s."""
    return MoveCosts(kv_bytes=kv_bytes, prefill_speed=prefill, bandwidth=bandwidth, latency=latency)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(1, 100_000), st.floats(1, 1e6), st.floats(1, 1e6), st.floats(1e6, 1e11), st.floats(0, 10))
def test_the_rule_takes_the_cheaper_way(context: int, kv_bytes: float, prefill: float, bandwidth: float,
                                        latency: float) -> None:
    """Whatever the machines: never the way that costs more (up to the rounding of the two sums)."""
    moving, computing = latency + context * kv_bytes / bandwidth, context / prefill
    if math.isclose(moving, computing, rel_tol=1e-9):
        return
    wanted = Move.KV if moving < computing else Move.RECOMPUTE
    assert costs(kv_bytes, prefill, bandwidth, latency).cheaper(context) is wanted


def test_crossover_is_where_both_ways_cost_the_same() -> None:
    """SmolLM2's 23,040 bytes a token at 1,000 tokens/s over 10 Gbit/s and a second of latency: 1,019 tokens."""
    rule = costs()
    assert rule.crossover == pytest.approx(1 / (1 / 1_000 - 23_040 / 1.25e9))
    assert rule.cheaper(1_018) is Move.RECOMPUTE
    assert rule.cheaper(1_020) is Move.KV


def test_where_a_token_is_computed_faster_than_it_is_sent_nothing_is_sent() -> None:
    """A fast device behind a slow link recomputes every context."""
    assert costs(prefill=100_000, bandwidth=1e8).crossover == math.inf
    assert costs(prefill=100_000, bandwidth=1e8).cheaper(10**9) is Move.RECOMPUTE


@pytest.mark.parametrize("wrong", [{"bandwidth": 0.0}, {"prefill": 0.0}, {"latency": -1.0}, {"kv_bytes": -1.0}])
def test_impossible_costs_are_refused(wrong: dict[str, float]) -> None:
    """Zero speeds and negative amounts are mistakes, not answers."""
    with pytest.raises(ValueError, match="must be over 0"):
        costs(**wrong)
