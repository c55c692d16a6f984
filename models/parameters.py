"""A model's parameters by their canonical names, and packed by the kernel set.

Owns the joining of names and the stacking of several projections into one product.  Does not know checkpoint names,
files or architectures.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from batchgen_beam.models.interface import KernelSet, PackedWeight

__all__ = ["Parameters", "TensorSource"]

TensorSource = Callable[[str], Tensor]
"""Canonical parameter name -> its tensor in the run's dtype, or in float32 where the name's table says so; asked once
per name, in the order of the layers."""


class Parameters:
    """The parameters under one prefix, such as `layers.3.`."""

    def __init__(self, get: TensorSource, kernels: KernelSet, prefix: str = "") -> None:
        self.kernels = kernels
        self._get = get
        self._prefix = prefix

    def under(self, name: str) -> Parameters:
        """Those whose names go on with `name` and a dot."""
        return Parameters(self._get, self.kernels, f"{self._prefix}{name}.")

    def tensor(self, name: str) -> Tensor:
        """One parameter."""
        return self._get(self._prefix + name)

    def packed(self, *names: str, biased: bool = False) -> PackedWeight:
        """Projections `[N_i, K]` stacked along N; a projection's bias adds `.bias` to its name."""
        weights = [self.tensor(name) for name in names]
        biases = [self.tensor(f"{name}.bias") for name in names] if biased else None
        return self.kernels.pack(weights, biases=biases)

    def packed_exact(self, name: str) -> PackedWeight:
        """A projection whose product is float32, for `KernelSet.head`."""
        return self.kernels.pack_head(self.tensor(name))
