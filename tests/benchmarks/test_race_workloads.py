"""The race's own workloads have the lengths and shapes that their names stand for, and are the same each time."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from benchmarks.race.workloads import NAMES, Row, Workload, generate, read, shared_prefix, write


def tokenize(text: str) -> list[int]:
    """One id for each word."""
    return [sum(map(ord, word)) for word in text.split()]


@pytest.fixture(scope="module")
def workloads() -> dict[str, Workload]:
    """All of them."""
    return {name: generate(name, tokenize) for name in NAMES}


@pytest.mark.parametrize(("name", "rows", "prompts", "outputs"), [
    ("W1", 256, (16, 128), (4, 512)), ("W1s", 64, (16, 128), (4, 512)), ("W2", 64, (512, 1024), (16, 64)),
    ("W3", 512, (272, 304), (32, 32)), ("W4", 1024, (16, 96), (4, 512))])
def test_lengths_are_within_bounds(workloads: dict[str, Workload], name: str, rows: int, prompts: tuple[int, int],
                                   outputs: tuple[int, int]) -> None:
    """As many rows as it says, none shorter or longer, and the bounds are nearly reached."""
    found = workloads[name].rows
    sizes = [len(row.prompt_ids) for row in found]
    assert len(found) == len({row.uuid for row in found}) == rows
    assert prompts[0] <= min(sizes) <= prompts[0] * 1.25
    assert prompts[1] * 0.95 <= max(sizes) <= prompts[1]
    assert all(outputs[0] <= row.max_tokens <= outputs[1] for row in found)


@pytest.mark.parametrize(("name", "median"), [("W1", 48), ("W4", 32)])
def test_outputs_have_a_long_tail(workloads: dict[str, Workload], name: str, median: int) -> None:
    """The median is about what it should be, the mean far above it, and the longest row at the limit or near it."""
    lengths = [row.max_tokens for row in workloads[name].rows]
    assert statistics.median(lengths) == pytest.approx(median, rel=0.2)
    assert statistics.mean(lengths) > 1.3 * statistics.median(lengths)
    assert max(lengths) > 8 * median


def test_small_w1_is_every_fourth_by_length(workloads: dict[str, Workload]) -> None:
    """Rows of W1 in W1's order; the longest is among them."""
    whole, small = workloads["W1"].rows, workloads["W1s"].rows
    assert [row for row in whole if row in small] == list(small)
    ranked = sorted(row.max_tokens for row in whole)
    assert sorted(row.max_tokens for row in small) == ranked[3::4]


def test_only_w3_shares_a_prefix(workloads: dict[str, Workload]) -> None:
    """256 tokens or little more by chance; elsewhere prompts differ early."""
    shared = {name: workload.facts()["shared_prefix"] for name, workload in workloads.items()}
    assert shared["W3"] == 256
    assert all(tokens < 8 for name, tokens in shared.items() if name != "W3")


def test_same_each_time_and_through_a_file(workloads: dict[str, Workload], tmp_path: Path) -> None:
    """A second draw is equal; what was written is read back."""
    assert generate("W2", tokenize) == workloads["W2"]
    write(workloads["W2"], tmp_path / "W2.jsonl")
    assert read(tmp_path / "W2.jsonl") == workloads["W2"]


def test_shared_prefix_leaves_each_row_a_token() -> None:
    """Equal prompts share all but their last token, a single one nothing."""
    one = Row(uuid="a", prompt_ids=(1, 2, 3), max_tokens=1)
    assert shared_prefix([one]) == 0
    assert shared_prefix([one, Row(uuid="b", prompt_ids=(1, 2, 3), max_tokens=1)]) == 2
    assert shared_prefix([one, Row(uuid="b", prompt_ids=(1, 4), max_tokens=1)]) == 1


def test_unknown_name() -> None:
    """Named with what there is."""
    with pytest.raises(ValueError, match=r"W9.*W1, W1s"):
        generate("W9", tokenize)
