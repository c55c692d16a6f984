"""Laws of the load-time self-test: it passes what holds, and names what does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from batchgen_beam.kernels.gemm import PackedLinear
from batchgen_beam.kernels.self_test import (
    FEW_OUTPUTS,
    WEIGHT_NUMBERS,
    AttentionShape,
    ExpertShape,
    ModelShapes,
    check_invariance,
)
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.interface import Activation, BatchView, CacheSpec, Expert, Routing
from tests.kernels.sets import NATIVE, native

SHAPES = ModelShapes(linear=((192, 1536), (576, 192)), head=(4099, 192), norms=(192,), activations=(288,),
                     attention=(AttentionShape(heads=6, kv_heads=2, size=32),
                                AttentionShape(heads=6, kv_heads=2, size=32, window=100),
                                AttentionShape(heads=6, kv_heads=2, size=32, sinks=True),
                                AttentionShape(heads=4, kv_heads=1, size=48, value_size=32)),
                     experts=ExpertShape(count=12, chosen=3, size=192, inner=96,
                                         activation=Activation(alpha=1.702, limit=7.0, shift=1.0)))


class Chatty(TorchKernels):
    """Kernels whose attention and norm know how many tokens ride along."""

    def attention(self, q_THd: Tensor, keys: tuple[CacheSpec, Tensor], values: tuple[CacheSpec, Tensor],
                  view: BatchView, scale: float, *, sinks_H: Tensor | None = None) -> Tensor:
        return super().attention(q_THd, keys, values, view, scale * (1 + len(q_THd) / 100), sinks_H=sinks_H)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return super().rms_norm(x_TD, weight_D, eps * len(x_TD))


class ChattyExperts(TorchKernels):
    """Experts that know how many tokens ride along."""

    def experts(self, x_TD: Tensor, routing: Routing, experts: Sequence[Expert], activation: Activation, *,
                shared_TD: Tensor | None = None) -> Tensor:
        return super().experts(x_TD, routing, experts, activation, shared_TD=shared_TD) * (1 + len(x_TD) * 2.0**-20)


class ChattyProducts(TorchKernels):
    """Kernels whose products know how many rows they have, as those of a GEMM library do."""

    def linear(self, x_TK: Tensor, weight: PackedLinear) -> Tensor:
        return super().linear(x_TK, weight) * (1 + len(x_TK) * 2.0**-20)

    def head(self, x_WD: Tensor, weight: PackedLinear) -> Tensor:
        return super().head(x_WD, weight) * (1 + len(x_WD) * 2.0**-20)


class Weighing(ChattyProducts):
    """Kernels that know how many numbers they were given to pack at once."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.most = 0

    def pack(self, weights: Sequence[Tensor], *, biases: Sequence[Tensor] | None = None) -> PackedLinear:
        self.most = max(self.most, sum(weight.numel() for weight in weights))
        return super().pack(weights, biases=biases)

    def pack_head(self, weight_VD: Tensor) -> PackedLinear:
        self.most = max(self.most, weight_VD.numel())
        return super().pack_head(weight_VD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["", "int8"])
def test_the_torch_set_passes(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """On this machine, with this torch and thread count, every operation keeps the law."""
    result = check_invariance(TorchKernels(dtype, kv_dtype=kv_dtype), SHAPES, longest=1024)
    assert result.failures == ()
    assert result.deterministic


@pytest.mark.parametrize(("dtype", "path"), NATIVE)
def test_the_native_set_passes(dtype: torch.dtype, path: str) -> None:
    """On every path, with experts, windows and sinks; latent attention is not its."""
    shapes = replace(SHAPES, attention=tuple(shape for shape in SHAPES.attention if shape.value_size is None))
    assert check_invariance(native(dtype, path, 2), shapes, longest=512).failures == ()


def test_products_that_know_their_batch_are_found() -> None:
    """The self-test says false, and names products and batches, and nothing else."""
    result = check_invariance(ChattyProducts(torch.float32), SHAPES, longest=128)
    assert not result.deterministic
    assert {failure.split()[0] for failure in result.failures} == {"linear", "head", "router", "experts"}
    assert "linear 192x1536: batch of 1" in result.failures


def test_large_weights_are_tested_by_a_part_of_them() -> None:
    """Of shapes that were cut none takes more than its share of memory, and a break of the law is found in each."""
    kernels = Weighing()
    shapes = ModelShapes(linear=((150_000, 32),), head=(150_001, 32), norms=(), activations=(), attention=(),
                         experts=ExpertShape(count=12, chosen=2, size=64, inner=40_000)).cut()
    result = check_invariance(kernels, shapes)
    assert WEIGHT_NUMBERS // 2 < kernels.most <= WEIGHT_NUMBERS
    assert {failure.split(":")[0] for failure in result.failures} >= {
        "linear 131072x32", "head 131072x32", "linear 65536x64", "linear 64x40000", "experts 12x2688x64"}


def test_shapes_are_cut_to_a_bound_and_keep_their_inputs() -> None:
    """Small ones as they are; of large ones no weight has more numbers than the bound, of experts all together, and
    every distance over which a product sums is still there."""
    assert SHAPES.cut() == SHAPES
    large = replace(SHAPES, linear=((57344, 8192), (8192, 28672), (8192, 1 << 20)), head=(128256, 8192),
                    activations=(28672,), experts=ExpertShape(count=256, chosen=8, size=7168, inner=2048))
    cut = large.cut()
    assert cut.linear == ((512, 8192), (128, 28672), (64, 1 << 20), (576, 7168), (2048, 2048))
    assert cut.head == (512, 8192)
    assert cut.experts is not None
    assert 3 * 8 * cut.experts.inner * 7168 <= max(WEIGHT_NUMBERS, 3 * 8 * FEW_OUTPUTS * 7168)
    assert cut.activations[0] < 28672
    assert replace(cut, linear=(), head=(1, 1), activations=(), experts=None) == replace(
        large, linear=(), head=(1, 1), activations=(), experts=None)


def test_each_broken_operation_is_named() -> None:
    """An attention and a norm that know their company are found under their own names, and nothing else is."""
    result = check_invariance(Chatty(torch.float32), SHAPES, longest=256)
    kinds = {failure.split()[0] for failure in result.failures}
    assert kinds == {"attention", "rms_norm"}
    assert "attention 6/2x32 window 100: position 64 in a mixed batch" in result.failures


def test_experts_that_know_their_company_are_named() -> None:
    """A set whose experts alone break the law is found out."""
    result = check_invariance(ChattyExperts(torch.float32), SHAPES, longest=128)
    assert {failure.split(":")[0] for failure in result.failures} == {"experts 12x96x192"}


def test_its_time_is_reported() -> None:
    """Seconds are those of the clock that was passed in."""
    ticks = iter([10.0, 12.5])
    few = ModelShapes(linear=(), head=(64, 8), norms=(), activations=(), attention=())
    assert check_invariance(TorchKernels(torch.float32), few, clock=lambda: next(ticks)).seconds == 2.5
