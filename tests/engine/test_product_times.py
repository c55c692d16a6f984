"""Times of layers from times of products: the sums that are written out here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batchgen_beam.engine.measured_costs import MeasuredCosts
from batchgen_beam.engine.product_times import times_of_products
from tests.engine.test_planner import MB, MODEL, MOE

SECONDS = {1: 1e-10, 16: 1e-10, 256: 16e-10}
"""A byte: read at 10 GB/s for few tokens, computed for many."""


def test_products_by_hand() -> None:
    """Attention, experts by their share of the tokens, and the head, at one token and at many."""
    costs = MeasuredCosts(MODEL, times_of_products(MODEL, SECONDS, 2e9))
    assert costs.disk == 2e9
    assert costs.attention(MOE, 1, 0.0, prompt=False) == pytest.approx(2 * MB * 1e-10)
    assert costs.attention(MOE, 256, 0.0, prompt=True) == pytest.approx(2 * MB * 16e-10)
    assert costs.feed_forward(MOE, 1) == pytest.approx((MB // 10 + 2 * 4 * MB) * 1e-10)
    touched = MOE.touched(1024)
    share = 1024 * 2 / touched
    each = 1e-10 + 15e-10 * (share - 16) / 240
    assert costs.feed_forward(MOE, 1024) == pytest.approx(
        MB // 10 * 16e-10 * (1024 - 16) / 240 * 15 / 16 + MB // 10 * 1e-10 + touched * 4 * MB * each)
    assert costs.head(1) == pytest.approx(4 * MB * 1e-10)
    assert costs.combine(100) == 0.0


def test_the_past_of_answers_is_read_and_that_of_prompts_computed() -> None:
    """Keys and values of each row at the rate of few tokens; operations at that of many."""
    costs = MeasuredCosts(MODEL, times_of_products(MODEL, SECONDS, 2e9))
    own = costs.attention(MOE, 256, 0.0, prompt=False)
    assert costs.attention(MOE, 256, 500.0, prompt=False) - own == pytest.approx(256 * 500 * 1024 * 1e-10)
    operation = 16e-10 * 2 * MB / (256 * 2 * MB)
    assert costs.attention(MOE, 256, 500.0, prompt=True) - own == pytest.approx(256 * 500 * 4096 * operation)


def test_no_window_is_seen_beyond() -> None:
    """A layer with a window of 128 takes for any longer past what it takes for 128."""
    model = replace(MODEL, layers=(replace(MOE, window=128),))
    costs = MeasuredCosts(model, times_of_products(model, SECONDS, 2e9))
    near, far = (costs.attention(model.layers[0], 8, context, prompt=False) for context in (128.0, 4000.0))
    assert near == far > costs.attention(model.layers[0], 8, 0.0, prompt=False)
