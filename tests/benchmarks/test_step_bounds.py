"""Bounds of the parts of a step, counted by hand, and the table that shows them."""

from __future__ import annotations

import pytest

from batchgen_beam.transforms.step_times import StepTime
from benchmarks.race.bound import Shapes
from benchmarks.step_bounds import part_bounds, table

SHAPES = Shapes(hidden=4, inner=6, layers=2, heads=2, kv_heads=1, head_size=2, vocabulary=10)


def test_few_rows_wait_for_weights() -> None:
    """64, 32, 96, 48 and 40 weights of two bytes at 50 bytes/s; keys and values of 5 tokens are 2 * 2 * 2 * 5."""
    bounds = part_bounds(SHAPES, 1, 5, flops=1000, read=50)
    assert bounds == pytest.approx({"qkv": 64 / 25, "out": 32 / 25, "gate_up": 96 / 25, "down": 48 / 25,
                                    "head": 40 / 25, "attention": 40 / 25})


def test_many_rows_wait_for_products() -> None:
    """At 100 rows a product of 64 weights is 12,800 FLOPs; attention still reads: 4,000 values against 16,000 FLOPs."""
    bounds = part_bounds(SHAPES, 100, 5, flops=1000, read=50)
    assert bounds["qkv"] == pytest.approx(12.8)
    assert bounds["attention"] == pytest.approx(4000 * 2 / 50)
    assert part_bounds(SHAPES, 100, 5, flops=80, read=50)["attention"] == pytest.approx(16000 / 80)


def test_a_part_without_a_bound_shows_its_time_alone() -> None:
    """Milliseconds, and how much of them the bound is; the step against the sum of all bounds."""
    bounds = part_bounds(SHAPES, 1, 5, flops=1000, read=50)
    time = StepTime(rows=1, median=2 * sum(bounds.values()), least=1, greatest=40, parts={"norm": 0.5, "qkv": 5.12})
    lines = list(table(SHAPES, [time], 5, {"flops": 1000.0, "read": 50.0}))
    assert lines[0] == "| part | 1 rows |"
    assert lines[2:4] == ["| norm | 500.00 |", "| qkv | 5120.00 (0.50) |"]
    assert lines[-1] == f"| step | {2e3 * sum(bounds.values()):.2f} (0.50) |"
