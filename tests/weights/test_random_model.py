"""Laws of random models: every family is made from its configuration alone, computes finite numbers, and obeys the
limit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from batchgen_beam.config.base import ModelConfig
from batchgen_beam.config.model_registry import load_config
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.interface import PackedWeight
from batchgen_beam.weights.random_model import random_model
from tests.models.paged import PagedRun
from tests.models.tiny import TINIES

UNBOUNDED = 1 << 60


def config_of(name: str, folder: Path) -> ModelConfig:
    """The configuration of a tiny model, from its file."""
    tiny = TINIES[name]
    keys = {**tiny.config(**tiny.keys).to_dict(), **tiny.said}
    (folder / "config.json").write_text(json.dumps(keys))
    return load_config(str(folder))


class Counting(TorchKernels):
    """Remembers what it packed."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.packed: list[int] = []
        self.sums: set[float] = set()

    def pack(self, weights: list[torch.Tensor], *, biases: list[torch.Tensor] | None = None) -> PackedWeight:  # type: ignore[override]
        """As the set does."""
        self.packed.append(sum(weight.nbytes for weight in weights))
        self.sums.add(float(weights[0].sum()))
        return super().pack(weights, biases=biases)


@pytest.mark.parametrize("name", TINIES)
def test_logits_are_finite_and_differ_by_token(name: str, tmp_path: Path) -> None:
    """A model that gave infinities, or the same for every token, would time something else."""
    kernels = TorchKernels(torch.float32)
    model = random_model(config_of(name, tmp_path), kernels, seed=1, room=UNBOUNDED)
    logits_TV = PagedRun(model, kernels).forward(("a", (5, 9, 200)), ("b", (7, 7)), every=True)
    assert torch.isfinite(logits_TV).all()
    assert len({tuple(line) for line in logits_TV.tolist()}) == len(logits_TV)


@pytest.mark.parametrize(("seed", "same"), [(1, True), (2, False)])
def test_the_seed_decides_the_weights(seed: int, same: bool, tmp_path: Path) -> None:
    """Equal seeds give equal logits."""
    kernels, config = TorchKernels(torch.float32), config_of("mixtral", tmp_path)
    found = [PagedRun(random_model(config, kernels, seed=one, room=UNBOUNDED), kernels).forward(("a", (5, 9)))
             for one in (1, seed)]
    assert torch.equal(*found) is same


def test_beyond_the_limit_packed_weights_are_used_again(tmp_path: Path) -> None:
    """Without room one weight of each shape is packed; with room for all of them every one, no two of them alike."""
    config = config_of("mixtral", tmp_path)
    none, half, whole = Counting(), Counting(), Counting()
    random_model(config, whole, seed=1, room=UNBOUNDED)
    random_model(config, none, seed=1, room=0)
    random_model(config, half, seed=1, room=sum(whole.packed) // 2)
    assert len(whole.packed) == 3 * (2 + 8 * 2)
    assert len(whole.sums) == len(whole.packed)
    assert len(none.packed) == 4
    assert len(none.packed) < len(half.packed) < len(whole.packed)
    assert sum(half.packed) <= sum(whole.packed) // 2 + sum(none.packed)
