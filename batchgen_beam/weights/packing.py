"""What a product of a model is to those that store it: its parameters, its sizes, and the kernel set's form of it.

Owns the nouns `Product` and `StoredForm` and the protocol `Packing`, and the rule by which products are kept together:
those of one module (`layers.3.attention`, `layers.3.experts.7`).  Does not know files or kernel sets.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from batchgen_beam.models.interface import PackedWeight

__all__ = ["Packing", "Product", "StoredForm"]

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """Weights `[N_i, K]` that the kernel set packs into one, by the canonical names of their parameters.

    `biases` is empty or has one for each part; `outputs` are the N_i, `inputs` is K.
    """

    parts: tuple[str, ...]
    biases: tuple[str, ...]
    outputs: tuple[int, ...]
    inputs: int

    @property
    def parameters(self) -> tuple[str, ...]:
        """Weights, then biases."""
        return self.parts + self.biases

    @property
    def area(self) -> str:
        """The module that it belongs to."""
        return self.parts[0].rpartition(".")[0]

    @property
    def name(self) -> str:
        """Within its area."""
        return "+".join(part.rpartition(".")[2] for part in self.parts)

    @property
    def layer(self) -> int:
        """The layer, which the parts' names begin with."""
        match = _LAYER.match(self.parts[0])
        assert match, f"{self.parts[0]} is in no layer"
        return int(match[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredForm:
    """A tensor as it is stored: row-major, in the processor's byte order."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Packing(Protocol):
    """A kernel set's way of keeping products as plain tensors in host memory.

    Equal `name`s mean equal bytes for equal weights.  `copies`: `adopt` makes memory of its own, about as much as the
    tensors have, instead of using theirs.
    """

    name: str
    copies: bool

    def forms(self, product: Product) -> tuple[StoredForm, ...]:
        """What `store` will give."""

    def store(self, product: Product, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The product's weights (and biases, or none) in host memory, in the run's dtype, as they are stored."""

    def adopt(self, product: Product, tensors: Sequence[Tensor]) -> PackedWeight:
        """A weight for `KernelSet.linear` with the bits of `KernelSet.pack`; valid while the tensors' memory is."""

    def exact_bytes(self, outputs: int, inputs: int) -> int:
        """What `KernelSet.pack_head` keeps of such a weight."""
