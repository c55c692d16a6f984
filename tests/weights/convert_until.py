"""A conversion for tests to kill: `python -m tests.weights.convert_until FOLDER CACHE N` stops before its N-th product,
says so on its output, and waits."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from batchgen_beam.kernels.packing import PlainPacking
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.weights.checkpoint import check_checkpoint
from batchgen_beam.weights.copy_plan import CopyPlan
from batchgen_beam.weights.packed_copy import make_copy
from batchgen_beam.weights.packing import Product
from batchgen_beam.weights.tiered_loader import plan_copy

__all__ = ["CountingPacking", "copy_plan"]


class CountingPacking(PlainPacking):
    """The torch kernel set's packing, which counts, and waits before product `stop`."""

    def __init__(self, stop: int | None = None) -> None:
        super().__init__(TorchKernels(torch.float32))
        self.stored = 0
        self._stop = stop

    def store(self, product: Product, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """As ever."""
        if self.stored == self._stop:
            sys.stdout.write("waiting\n")
            sys.stdout.flush()
            sys.stdin.read()
        self.stored += 1
        return super().store(product, weights, biases)


def copy_plan(folder: Path, packing: CountingPacking) -> CopyPlan:
    """What a copy of the checkpoint holds."""
    return plan_copy(check_checkpoint(folder), TorchKernels(torch.float32), packing)[0]


if __name__ == "__main__":
    make_copy(copy_plan(Path(sys.argv[1]), CountingPacking(int(sys.argv[3]))), Path(sys.argv[2]))
