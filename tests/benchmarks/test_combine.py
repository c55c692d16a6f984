"""What the COMBINE benchmark counts is what runs."""

from __future__ import annotations

from typing import cast

import torch

from batchgen_beam.config.families.qwen import Qwen3MoeConfig
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.qwen3_moe import Qwen3MoeModel
from batchgen_beam.transforms.step_times import measure_steps
from batchgen_beam.weights.random_model import random_model
from benchmarks.combine import distinct, watch

ROWS, STEPS, LAYERS = 6, 2, 2


def test_distinct_experts_of_known_routes() -> None:
    """Each part of a batch runs every expert that it names once."""
    routes = [torch.tensor([[0, 1], [1, 2], [5, 0], [0, 1]]), torch.tensor([[3, 4]])]
    assert [distinct(routes, size) for size in (1, 2, 4)] == [10, 8, 6]


def test_runs_are_those_of_the_routes() -> None:
    """Of whole steps and of steps cut into parts; combined, the same tokens run fewer experts."""
    config = Qwen3MoeConfig(
        vocab_size=320, hidden_size=64, intermediate_size=32, moe_intermediate_size=32, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
        norm_topk_prob=True, max_position_embeddings=256)
    kernels = TorchKernels(torch.float32)
    model = cast(Qwen3MoeModel, random_model(config, kernels, seed=1, room=1 << 40))
    seen = watch(model, kernels)
    runs = []
    for part in (2, 0):
        seen.clear()
        measure_steps(model, kernels, ROWS, context=STEPS + 2, steps=STEPS, attention_batch=2, expert_batch=part)
        assert seen.tokens == ROWS * (STEPS + 1) * LAYERS
        assert seen.runs == distinct(seen.routes, part or ROWS)
        runs.append(seen.runs)
    assert runs[1] < runs[0] == distinct(seen.routes, 2)
