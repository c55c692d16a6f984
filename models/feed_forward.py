"""The dense gated feed-forward part: `down(activation(gate x, up x))`.  Does not know what stands around it.

Shape suffixes: T tokens, D hidden size, N outputs of a stacked projection.
"""

from __future__ import annotations

from torch import Tensor

from batchgen_beam.models.experts import SILU
from batchgen_beam.models.parameters import Parameters

__all__ = ["GatedFeedForward"]


class GatedFeedForward:
    """Parameters: `gate`, `up`, `down`, each with a bias if `biased`."""

    def __init__(self, source: Parameters, *, biased: bool = False) -> None:
        self._kernels = source.kernels
        self.gate_up = source.packed("gate", "up", biased=biased)
        self.down = source.packed("down", biased=biased)

    def __call__(self, normed_TD: Tensor) -> Tensor:
        """Token by token, [T, D]."""
        kernels = self._kernels
        return kernels.linear(kernels.swiglu(kernels.linear(normed_TD, self.gate_up), SILU), self.down)
