"""A model whose weights do not all fit into memory: planned, its packed copy made, resident weights read, the rest
streamed.

Owns the order of these steps.  Which products a model has is found by building it once from placeholders, so that no
table beside the model says it.  Does not know architectures, kernels or flags.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from batchgen_beam.models.interface import KernelSet, Model, PackedWeight
from batchgen_beam.weights.checkpoint import CheckpointFacts, check_checkpoint
from batchgen_beam.weights.direct_file import DirectFile
from batchgen_beam.weights.headers import TensorFacts
from batchgen_beam.weights.identity import weights_identity
from batchgen_beam.weights.loader import TensorReader, build_model, load_model
from batchgen_beam.weights.packed_copy import CopyPlan, PackedCopy, make_copy
from batchgen_beam.weights.packed_format import PackedHeader, pages
from batchgen_beam.weights.packing import Packing, Product
from batchgen_beam.weights.residency import LayerSizes, Residency, choose_residency
from batchgen_beam.weights.tiers import Placeholders, TieredKernels, Tiers, adopted
from batchgen_beam.weights.weight_stream import WeightStream, area_tensors, page_memory

__all__ = ["ModelProducts", "find_products", "load_tiered"]

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProducts:
    """What a model packs: `products` in the order of use, and the bytes of all else that it keeps in memory."""

    products: tuple[Product, ...]
    fixed_bytes: int


class _Recorder:
    """A kernel set that packs nothing and remembers what it was asked to."""

    def __init__(self, kernels: KernelSet, packing: Packing, placeholders: Placeholders) -> None:
        self._kernels, self._packing, self._placeholders = kernels, packing, placeholders
        self.products: list[Product] = []
        self.exact_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def pack(self, weights: list[Tensor], *, biases: list[Tensor] | None = None) -> None:
        product = self._placeholders.product(weights, biases)
        if product is not None:
            self.products.append(product)
        else:
            self.exact_bytes += sum(tensor.nbytes for tensor in (*weights, *(biases or ())))

    def pack_head(self, weight_VD: Tensor) -> None:
        self.exact_bytes += self._packing.exact_bytes(*weight_VD.shape)

    def fuse(self, decoder: object) -> None:
        del decoder


def find_products(facts: CheckpointFacts, kernels: KernelSet, packing: Packing) -> ModelProducts:
    """Build the model from placeholders, and see what it packs and what it keeps."""
    placeholders = Placeholders()
    recorder = _Recorder(kernels, packing, placeholders)
    model = build_model(facts, lambda name: placeholders.make(name, facts.tensors[name].shape, kernels.dtype),
                        cast(KernelSet, recorder))
    kept = sum(tensor.nbytes for tensor in placeholders.kept().values())
    del model
    return ModelProducts(products=tuple(recorder.products), fixed_bytes=kept + recorder.exact_bytes)


def load_tiered(folder: Path, kernels: KernelSet, packing: Packing, *, limit: int, cache: Path) -> Model:
    """The model in `folder`, with at most `limit` bytes of weights in memory.

    What does not fit is streamed from a packed copy in `cache`, made on first use; bits are those of `load_model`.

    Raises:
        CheckpointError: a fault of the folder, or of the copy.
        OptionError: the limit is too low for any plan, or `cache` can't hold the copy.
    """
    facts = check_checkpoint(folder)
    found = find_products(facts, kernels, packing)
    plan = CopyPlan(source=weights_identity(folder), packing=packing, dtype=kernels.dtype, products=found.products,
                    tensors=facts.tensors, read=lambda tensors: _read(tensors, kernels.dtype))
    residency = _plan(plan, found.fixed_bytes, limit)
    LOG.info("weights: %s bytes in memory of --weight-memory=%s, %s bytes streamed in each step",
             *(f"{size:,}" for size in (residency.total_bytes, limit, residency.streamed_bytes)))
    if not residency.streamed:
        return load_model(folder, kernels)
    copy = make_copy(plan, cache)
    tiers = Tiers(packing, _load_resident(copy, residency, packing), WeightStream(
        copy, residency.streamed, buffers=residency.buffers, buffer_bytes=residency.buffer_bytes))
    return _build(facts, kernels, tiers, found.products)


def _plan(plan: CopyPlan, fixed: int, limit: int) -> Residency:
    layers = [_sizes(header) for header in plan.headers().values()]
    scratch = max((size for layer in layers for _, size in layer.areas), default=0) if plan.packing.copies else 0
    return choose_residency(layers, limit=limit, fixed=fixed, scratch=scratch)


def _sizes(header: PackedHeader) -> LayerSizes:
    return LayerSizes(layer=header.layer, areas=tuple((area.name, pages(area.size)) for area in header.areas))


def _read(tensors: Mapping[str, TensorFacts], dtype: torch.dtype) -> dict[str, Tensor]:
    with TensorReader(tensors, dtype, torch.device("cpu")) as reader:
        return {name: reader.get(name) for name in tensors}


def _load_resident(copy: PackedCopy, residency: Residency, packing: Packing) -> dict[Product, PackedWeight]:
    """Read each resident area once, into memory of its own."""
    resident: dict[Product, PackedWeight] = {}
    chosen = set(residency.resident)
    for file in copy.layers.values():
        with closing(DirectFile(file.path)) as source:
            for area in (area for area in file.header.areas if area.name in chosen):
                memory = page_memory(pages(area.size))
                source.read(file.begin + area.offset, memoryview(memory), lambda: True)
                file.verify(area, memoryview(memory))
                tensors = area_tensors(memory, area)
                resident |= {product: adopted(packing, product, tensors) for product in copy.products[area.name]}
    return resident


def _build(facts: CheckpointFacts, kernels: KernelSet, tiers: Tiers, products: tuple[Product, ...]) -> Model:
    """The model over its tiers; the stream ends with it."""
    packed = {name for product in products for name in product.parameters}
    placeholders = Placeholders()
    tiered = TieredKernels(kernels, placeholders, tiers)
    plain = {name: tensor for name, tensor in facts.tensors.items() if name not in packed}
    with TensorReader(plain, kernels.dtype, kernels.device) as reader:
        def get(name: str) -> Tensor:
            if name in packed:
                return placeholders.make(name, facts.tensors[name].shape, kernels.dtype)
            return reader.get(name)

        model = build_model(facts, get, cast(KernelSet, tiered))
    weakref.finalize(tiered, tiers.close)
    return model
