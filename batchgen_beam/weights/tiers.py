"""Weights on two tiers, memory and disk, behind the interface of a kernel set.

A model is built with `TieredKernels` in place of its kernel set, and with placeholders in place of the parameters that
were packed into files: `pack` then gives the resident weight, or a `StreamedWeight` that `linear` looks up at the
moment of use.  So models do not know tiers, and a product has the same bits on either.  Owns the lookup, and the layer that is
held: until another one is asked for, so that parts of a batch may take turns within a layer.  Does not know which
products a model has, or how files are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from batchgen_beam.models.dense import DenseDecoder
from batchgen_beam.models.interface import Forward, KernelSet, PackedWeight
from batchgen_beam.weights.packing import Packing, Product
from batchgen_beam.weights.weight_stream import LeasedAreas, WeightStream

__all__ = ["Placeholders", "StreamedWeight", "TieredKernels", "Tiers", "adopted"]


class Placeholders:
    """Tensors without memory that stand for parameters while a model is built."""

    def __init__(self) -> None:
        self._names: Any = WeakIdKeyDictionary()

    def make(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """One that is recognised as long as it is kept."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._names[tensor] = name
        return tensor

    def kept(self) -> dict[str, Tensor]:
        """Those that something still refers to, by name."""
        return {name: tensor for tensor, name in self._names.items()}

    def product(self, weights: Sequence[Tensor], biases: Sequence[Tensor] | None) -> Product | None:
        """The product of these placeholders; None if they are others, or not of a layer."""
        names = [self._names.get(tensor) for tensor in (*weights, *(biases or ()))]
        if None in names:
            return None
        product = Product(parts=tuple(names[:len(weights)]), biases=tuple(names[len(weights):]),
                          outputs=tuple(weight.shape[0] for weight in weights), inputs=weights[0].shape[1])
        return None if product.layer is None else product


def adopted(packing: Packing, product: Product, tensors: Mapping[str, Tensor]) -> PackedWeight:
    """The product's weight over its tensors among those of its area."""
    return packing.adopt(product, [tensors[f"{product.name}.{i}"] for i in range(len(packing.forms(product)))])


class StreamedWeight:
    """A packed weight that is in no memory yet."""

    def __init__(self, product: Product) -> None:
        self.product = product


class Tiers:
    """Where each product is: `resident` weights by product, the others in `stream` (None: there are no others)."""

    def __init__(self, packing: Packing, resident: Mapping[Product, PackedWeight], stream: WeightStream | None) -> None:
        self._packing = packing
        self._resident = resident
        self._stream = stream
        self._lease = ExitStack()
        self._held: tuple[int | None, LeasedAreas | None] = None, None
        self._ready: dict[Product, PackedWeight] = {}

    @property
    def has_streamed(self) -> bool:
        """Whether any product is not resident."""
        return self._stream is not None

    def weight(self, product: Product) -> PackedWeight | StreamedWeight:
        """What a model keeps of the product."""
        return self._resident[product] if product in self._resident else StreamedWeight(product)

    def use(self, weight: StreamedWeight) -> PackedWeight:
        """The weight in memory, valid until a product of another layer is asked for."""
        product = weight.product
        held, areas = self._held
        if held != product.layer or areas is None:
            areas = self._take(product.layer)
        if product not in self._ready:
            self._ready[product] = adopted(self._packing, product, areas.tensors(product.area))
            if self._packing.copies:
                return self._ready.pop(product)
        return self._ready[product]

    def _take(self, layer: int | None) -> LeasedAreas:
        assert self._stream is not None
        assert layer is not None
        self.release()
        areas = self._lease.enter_context(self._stream.layer(layer))
        self._held = layer, areas
        return areas

    def release(self) -> None:
        """Give the held layer's buffer back."""
        self._ready.clear()
        self._held = None, None
        self._lease.close()

    def close(self) -> None:
        """Stop the stream."""
        self.release()
        if self._stream is not None:
            self._stream.close()


class TieredKernels:
    """A kernel set whose packed weights may be on disk; what is not named here is the kernel set's own."""

    def __init__(self, kernels: KernelSet, placeholders: Placeholders, tiers: Tiers) -> None:
        self._kernels = kernels
        self._placeholders = placeholders
        self._tiers = tiers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def pack(self, weights: Sequence[Tensor], *, biases: Sequence[Tensor] | None = None) -> PackedWeight:
        """The product that the placeholders stand for; tensors with memory are packed as ever."""
        product = self._placeholders.product(weights, biases)
        return self._kernels.pack(weights, biases=biases) if product is None else self._tiers.weight(product)

    def linear(self, x_TK: Tensor, weight: PackedWeight) -> Tensor:
        """The kernel set's, on a weight of either tier."""
        return self._kernels.linear(x_TK, self._tiers.use(weight) if isinstance(weight, StreamedWeight) else weight)

    def fuse(self, decoder: DenseDecoder) -> Forward | None:
        """One call wants all weights in memory at once."""
        return None if self._tiers.has_streamed else self._kernels.fuse(decoder)
