"""Weights on two tiers, memory and disk, behind the interface of a kernel set.

A model is built with `TieredKernels` in place of its kernel set, and with placeholders in place of the parameters that
were packed into files: `pack` then gives the resident weight, or a `StreamedWeight` that is looked up at the moment of
use.  So models do not know tiers, and a product has the same bits on either.  Owns the lookup, and what is made of the
unit in use.  Does not know which products a model has, or how files are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from batchgen_beam.models.dense import DenseDecoder
from batchgen_beam.models.experts import Activation, Expert, Routing
from batchgen_beam.models.interface import Forward, KernelSet, PackedWeight
from batchgen_beam.weights.packing import Packing, Product
from batchgen_beam.weights.weight_stream import WeightStream

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

    def kept_bytes(self) -> int:
        """Of those that something still refers to, if they had memory."""
        return sum(tensor.nbytes for tensor in self._names)

    def product(self, weights: Sequence[Tensor], biases: Sequence[Tensor] | None) -> Product | None:
        """The product of these placeholders; None if they are other tensors, such as parts of one."""
        names = [self._names.get(tensor) for tensor in (*weights, *(biases or ()))]
        if None in names:
            return None
        return Product(parts=tuple(names[:len(weights)]), biases=tuple(names[len(weights):]),
                       outputs=tuple(weight.shape[0] for weight in weights), inputs=weights[0].shape[1])


def adopted(packing: Packing, product: Product, tensors: Mapping[str, Tensor]) -> PackedWeight:
    """The product's weight over its tensors among those of its area."""
    return packing.adopt(product, [tensors[f"{product.name}.{i}"] for i in range(len(packing.forms(product)))])


@dataclass(frozen=True, slots=True)
class StreamedWeight:
    """A packed weight that is in no memory yet, and the unit that holds it."""

    product: Product
    unit: str


class Tiers:
    """Where each product is: `resident` weights by product, the others in `stream`."""

    def __init__(self, packing: Packing, resident: Mapping[Product, PackedWeight], stream: WeightStream) -> None:
        self._packing = packing
        self._resident = resident
        self.stream = stream
        self._used: str | None = None
        self._ready: dict[Product, PackedWeight] = {}

    def weight(self, product: Product) -> PackedWeight | StreamedWeight:
        """What a model keeps of the product."""
        found = self._resident.get(product)
        return StreamedWeight(product, product.area) if found is None else found

    def ready(self, weight: PackedWeight | StreamedWeight) -> PackedWeight:
        """The weight in memory; a streamed one is valid until one of another unit is asked for."""
        if not isinstance(weight, StreamedWeight):
            return weight
        if self._used != weight.unit:
            self._ready.clear()
            self._used = None
        if weight.product not in self._ready:
            tensors = self.stream.use(weight.unit)
            self._used = weight.unit
            self._ready[weight.product] = adopted(self._packing, weight.product, tensors)
        return self._ready[weight.product]

    def expect(self, experts: Sequence[Expert], chosen: Sequence[int]) -> bool:
        """Say which of a layer's experts come next; whether any of them is streamed."""
        streamed = {e: expert.gate_up for e, expert in enumerate(experts)
                    if isinstance(expert.gate_up, StreamedWeight)}
        if streamed:
            layer = next(iter(streamed.values())).product.layer
            self.stream.expect(layer, [streamed[e].unit for e in chosen if e in streamed])
        return bool(streamed)

    def close(self) -> None:
        """Stop the stream."""
        self._ready.clear()
        self.stream.close()


class _ExpertsInTurn(Sequence[Expert]):
    """Experts that come into memory when they are looked up; one is valid until the next is."""

    def __init__(self, tiers: Tiers, experts: Sequence[Expert]) -> None:
        self._tiers, self._experts = tiers, experts

    def __len__(self) -> int:
        return len(self._experts)

    @overload
    def __getitem__(self, index: int) -> Expert: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Expert]: ...

    def __getitem__(self, index: int | slice) -> Expert | Sequence[Expert]:
        assert isinstance(index, int), "experts are looked up one at a time"
        expert = self._experts[index]
        return Expert(gate_up=self._tiers.ready(expert.gate_up), down=self._tiers.ready(expert.down))


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
        return self._kernels.linear(x_TK, self._tiers.ready(weight))

    def experts(self, x_TD: Tensor, routing: Routing, experts: Sequence[Expert], activation: Activation, *,
                shared_TD: Tensor | None = None) -> Tensor:
        """The kernel set's; no expert that no token chose is read from disk."""
        chosen = routing.ids_Tk.unique().tolist()
        if self._tiers.expect(experts, chosen):
            experts = _ExpertsInTurn(self._tiers, experts)
        return self._kernels.experts(x_TD, routing, experts, activation, shared_TD=shared_TD)

    def fuse(self, decoder: DenseDecoder) -> Forward | None:
        """One call wants all weights in memory at once."""
        del decoder
        return None
