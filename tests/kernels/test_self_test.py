"""Laws of the load-time self-test: it passes what holds, and names what does not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from batchgen_beam.kernels.gemm import PackedLinear
from batchgen_beam.kernels.self_test import AttentionShape, ModelShapes, check_invariance
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.interface import BatchView, CacheSpec

SHAPES = ModelShapes(linear=((192, 1536), (576, 192)), head=(4099, 192), norms=(192,), activations=(288,),
                     attention=(AttentionShape(heads=6, kv_heads=2, size=32),
                                AttentionShape(heads=6, kv_heads=2, size=32, window=100)))


class Chatty(TorchKernels):
    """Kernels whose attention and norm know how many tokens ride along."""

    def attention(self, q_THd: Tensor, keys: tuple[CacheSpec, Tensor], values: tuple[CacheSpec, Tensor],
                  view: BatchView, scale: float) -> Tensor:
        return super().attention(q_THd, keys, values, view, scale * (1 + len(q_THd) / 100))

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return super().rms_norm(x_TD, weight_D, eps * len(x_TD))


class ChattyProducts(TorchKernels):
    """Kernels whose products know how many rows they have, as those of a GEMM library do."""

    def linear(self, x_TK: Tensor, weight: PackedLinear) -> Tensor:
        return super().linear(x_TK, weight) * (1 + len(x_TK) * 2.0**-20)

    def head(self, x_WD: Tensor, weight: PackedLinear) -> Tensor:
        return super().head(x_WD, weight) * (1 + len(x_WD) * 2.0**-20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["", "int8"])
def test_the_torch_set_passes(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    """On this machine, with this torch and thread count, every operation keeps the law."""
    result = check_invariance(TorchKernels(dtype, kv_dtype=kv_dtype), SHAPES, longest=1024)
    assert result.failures == ()
    assert result.deterministic


def test_products_that_know_their_batch_are_found() -> None:
    """The self-test says false, and names products and batches, and nothing else."""
    result = check_invariance(ChattyProducts(torch.float32), SHAPES, longest=128)
    assert not result.deterministic
    assert {failure.split()[0] for failure in result.failures} == {"linear", "head"}
    assert "linear 192x1536: batch of 1" in result.failures


def test_each_broken_operation_is_named() -> None:
    """An attention and a norm that know their company are found under their own names, and nothing else is."""
    result = check_invariance(Chatty(torch.float32), SHAPES, longest=256)
    kinds = {failure.split()[0] for failure in result.failures}
    assert kinds == {"attention", "rms_norm"}
    assert "attention 6/2x32 window 100: position 64 in a mixed batch" in result.failures


def test_its_time_is_reported() -> None:
    """Seconds are those of the clock that was passed in."""
    ticks = iter([10.0, 12.5])
    few = ModelShapes(linear=(), head=(64, 8), norms=(), activations=(), attention=())
    assert check_invariance(TorchKernels(torch.float32), few, clock=lambda: next(ticks)).seconds == 2.5
