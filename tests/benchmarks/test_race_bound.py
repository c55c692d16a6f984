"""The ideal engine's steps, and the arithmetic of rates and bounds, on examples that can be counted by hand."""

from __future__ import annotations

import pytest

from benchmarks.race.bound import Shapes, Step, bound, shapes_of, steps
from benchmarks.race.roofline import best, gemm_rates
from benchmarks.race.workloads import Row

SHAPES = Shapes(hidden=4, inner=6, layers=2, heads=2, kv_heads=1, head_size=2, vocabulary=10)


def row(tokens: int, answer: int, first: int = 0) -> Row:
    """A prompt of so many ids that begins with `first`."""
    return Row(uuid=f"{first}", prompt_ids=(first, *range(100, 99 + tokens)), max_tokens=answer)


def test_a_row_of_n_tokens_takes_part_in_n_steps() -> None:
    """The first computes the prompt, the others one token each."""
    assert list(steps([row(3, 3)], 8)) == [
        Step(tokens=3, scored=1, pairs=6, kv_tokens=3), Step(tokens=1, scored=1, pairs=4, kv_tokens=4),
        Step(tokens=1, scored=1, pairs=5, kv_tokens=5)]


def test_a_free_place_is_filled_on_the_next_step() -> None:
    """Of three rows two run at once: the third begins after the shorter one has ended."""
    found = list(steps([row(2, 1, 0), row(2, 2, 1), row(5, 1, 2)], 2))
    assert [(step.tokens, step.scored) for step in found] == [(4, 2), (1 + 5, 2)]


def test_a_shared_prefix_is_computed_and_read_once() -> None:
    """Two prompts of four ids that share three: 4 + 1 tokens, 10 + 4 pairs, and 3 + 1 + 1 cached tokens read."""
    rows = [Row(uuid="a", prompt_ids=(1, 2, 3, 4), max_tokens=1), Row(uuid="b", prompt_ids=(1, 2, 3, 5), max_tokens=1)]
    assert list(steps(rows, 8)) == [Step(tokens=5, scored=2, pairs=14, kv_tokens=5)]


def test_bound_of_one_step() -> None:
    """Body 2 * (4*8 + 4*4 + 4*12 + 6*4) = 240 weights, head 40; 100 FLOP/s and 50 bytes/s."""
    assert (SHAPES.body, SHAPES.head) == (240, 40)
    found = bound([row(3, 1)], 8, SHAPES, 100.0, 50.0)
    compute, read = 2 * (240 * 3 + 40) / 100, 2 * 280 / 50
    pairs, cache = 4 * 2 * 2 * 2 * 6 / 100, 2 * 1 * 2 * 2 * 2 * 3 / 50
    assert found == pytest.approx({
        "steps": 1, "compute_seconds": compute, "read_seconds": read, "attention_seconds": pairs + cache,
        "sum_seconds": compute + read + pairs + cache, "overlap_seconds": max(compute + pairs, read + cache)})


def test_shapes_of_a_configuration() -> None:
    """Heads default to the classic sizes."""
    config = {"hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 1, "vocab_size": 10}
    assert shapes_of(config) == SHAPES


def test_best_rate_weighs_shapes_by_their_flops() -> None:
    """Each shape by its fastest library; a one-row product that streams faster than a sum is the read rate."""
    def gemm(shape: tuple[int, int], rate: float, rows: int) -> dict[str, object]:
        return {"library": "x", "threads": 1, "rows": rows, "inputs": shape[0], "outputs": shape[1], "flops": rate}

    sizes = [*(product[:2] for product in SHAPES.products), (4, 10)]
    gemms = [gemm(shape, 10.0, 256) for shape in sizes] + [gemm((4, 10), 20.0, 512), gemm((4, 12), 7.0, 1)]
    found = best(SHAPES, gemms, [{"library": "sum", "threads": 1, "bytes_per_second": 5.0}])
    assert found["flops"] == pytest.approx(280 / (240 / 10 + 40 / 20))
    assert (found["read"], found["read_by"]["library"]) == (7.0, "x, one row")


def test_rates_are_measured_for_every_library() -> None:
    """A record for each library, product and number of rows; all rates are positive."""
    shapes = Shapes(hidden=64, inner=64, layers=1, heads=1, kv_heads=1, head_size=64, vocabulary=64)
    records = gemm_rates(shapes, [1], rows=[1], copies_bytes=1 << 16)
    assert {(record["inputs"], record["outputs"]) for record in records} == {(64, 192), (64, 64), (64, 128)}
    assert "torch" in {record["library"] for record in records}
    assert all(record["flops"] > 0 for record in records)
