"""What a packed copy of a model should hold, worked out before a tensor is read.

Owns the layout: a file for each layer, an area for each module of it, tensors of an area one after the other.  Does not
know whether any of it is there (`packed_copy`), how a kernel set stores a product, or architectures.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from batchgen_beam.weights.headers import TensorFacts
from batchgen_beam.weights.packed_format import (
    FORMAT_VERSION,
    LINE,
    Area,
    PackedHeader,
    PackedTensor,
    SourceTensor,
    pages,
)
from batchgen_beam.weights.packing import Packing, Product
from batchgen_beam.weights.parameter import Parameter
from batchgen_beam.weights.quantized_storage import StoredTensor

__all__ = ["CopyPlan", "lay_area", "products_by_area"]

_NO_CRC = "0" * 8
"""Where the content is not known yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """What a copy is made from: `products` within layers, the checkpoint's `tensors` by parameter, and `source`, the
    identity of its weights; `storage` says how their numbers are read, which config.json decides."""

    source: str
    storage: str
    packing: Packing
    dtype: torch.dtype
    products: tuple[Product, ...]
    tensors: Mapping[str, StoredTensor]
    parameters: Mapping[str, Parameter]

    @property
    def prefix(self) -> str:
        """Common to the folders of all packings of these weights."""
        return f"packed-{self.source[:32]}-"

    @property
    def folder_name(self) -> str:
        """Other weights, another reading of them or another packing have another folder."""
        digest = hashlib.sha256(f"{self.packing.name} {self.dtype} {self.storage}".encode()).hexdigest()
        return f"{self.prefix}{digest[:16]}-v{FORMAT_VERSION}"

    def by_area(self) -> dict[str, tuple[Product, ...]]:
        """Products in the order of use, by area."""
        return products_by_area(self.products)

    def headers(self) -> dict[int, PackedHeader]:
        """For each layer what its file will hold, without checksums."""
        layers: dict[int, list[tuple[str, tuple[Product, ...]]]] = {}
        for name, products in self.by_area().items():
            layers.setdefault(products[0].layer, []).append((name, products))
        return {layer: self._header(layer, areas) for layer, areas in sorted(layers.items())}

    def sources(self, products: Iterable[Product]) -> list[TensorFacts]:
        """What is stored for them, each tensor once."""
        stored = (self.tensors[parameter] for product in products for parameter in product.parameters)
        return list({part.name: part for tensor in stored for part in tensor.parts}.values())

    def _header(self, layer: int, areas: Sequence[tuple[str, tuple[Product, ...]]]) -> PackedHeader:
        laid: list[Area] = []
        offset = 0
        for name, products in areas:
            laid.append(lay_area(name, products, self.packing, offset))
            offset += pages(laid[-1].size)
        stored = self.sources(product for _, products in areas for product in products)
        sources = tuple(SourceTensor(name=tensor.name, file=tensor.file.name, crc=_NO_CRC) for tensor in stored)
        return PackedHeader(source=self.source, packing=self.packing.name, dtype=str(self.dtype).removeprefix("torch."),
                            layer=layer, areas=tuple(laid), sources=sources)


def products_by_area(products: Iterable[Product]) -> dict[str, tuple[Product, ...]]:
    """In their order, by area."""
    areas: dict[str, list[Product]] = {}
    for product in products:
        areas.setdefault(product.area, []).append(product)
    return {name: tuple(own) for name, own in areas.items()}


def lay_area(name: str, products: Sequence[Product], packing: Packing, offset: int = 0) -> Area:
    """The area of these products, which begins at `offset` of its file's areas."""
    tensors: dict[str, PackedTensor] = {}
    end = 0
    for product in products:
        for i, form in enumerate(packing.forms(product)):
            tensor = PackedTensor(dtype=str(form.dtype).removeprefix("torch."), shape=form.shape,
                                  offset=-(-end // LINE) * LINE)
            tensors[f"{product.name}.{i}"] = tensor
            end = tensor.offset + tensor.size
    return Area(name=name, offset=offset, size=end, crc=_NO_CRC, tensors=tensors)
