"""A model whose weights do not all fit into memory: planned, its packed copy made, resident weights read, the rest
streamed.

Owns the order of these steps.  Which products a model has is found by building it once from placeholders, so that no
table beside the model says it.  Does not know architectures, kernels or flags.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from batchgen_beam.models.interface import KernelSet, Model, PackedWeight
from batchgen_beam.weights.checkpoint import CheckpointFacts, check_checkpoint
from batchgen_beam.weights.copy_plan import CopyPlan
from batchgen_beam.weights.direct_file import DirectFile
from batchgen_beam.weights.identity import weights_identity
from batchgen_beam.weights.loader import TensorReader, build_model, load_model
from batchgen_beam.weights.packed_copy import PackedCopy, make_copy
from batchgen_beam.weights.packed_format import pages
from batchgen_beam.weights.packing import Packing, Product
from batchgen_beam.weights.page_memory import page_memory
from batchgen_beam.weights.residency import Residency, Unit, choose_residency, streaming_order
from batchgen_beam.weights.tiers import Placeholders, TieredKernels, Tiers, adopted
from batchgen_beam.weights.weight_stream import StreamStats, WeightStream, area_tensors

__all__ = ["TieredModel", "load_tiered", "plan_copy", "weight_units"]

LOG = logging.getLogger(__name__)

_EXPERT = re.compile(r"\.experts\.(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredModel:
    """A model, where its weights are, and the stream of those that are not in memory (None: all are)."""

    model: Model
    residency: Residency
    stream: WeightStream | None

    def streamed(self) -> StreamStats | None:
        """What the stream has done so far."""
        return None if self.stream is None else self.stream.stats()


class _Recorder:
    """A kernel set that packs nothing and remembers what it was asked to."""

    def __init__(self, kernels: KernelSet, packing: Packing, placeholders: Placeholders) -> None:
        self._kernels, self._packing, self._placeholders = kernels, packing, placeholders
        self.products: list[Product] = []
        self.exact_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def pack(self, weights: Sequence[Tensor], *, biases: Sequence[Tensor] | None = None) -> None:
        product = self._placeholders.product(weights, biases)
        if product is not None:
            self.products.append(product)
        else:
            self.exact_bytes += sum(tensor.nbytes for tensor in (*weights, *(biases or ())))

    def pack_head(self, weight_VD: Tensor) -> None:
        self.exact_bytes += self._packing.exact_bytes(*weight_VD.shape)

    def fuse(self, decoder: object) -> None:
        del decoder


def _products(facts: CheckpointFacts, kernels: KernelSet, packing: Packing) -> tuple[tuple[Product, ...], int]:
    """What the model packs, in the order of use, and the bytes of all else that it keeps in memory."""
    placeholders = Placeholders()
    recorder = _Recorder(kernels, packing, placeholders)
    model = build_model(facts.config, lambda name: _placeholder(placeholders, facts, name, kernels),
                        cast(KernelSet, recorder))
    kept = placeholders.kept_bytes()
    del model
    return tuple(recorder.products), kept + recorder.exact_bytes


def _placeholder(placeholders: Placeholders, facts: CheckpointFacts, name: str, kernels: KernelSet) -> Tensor:
    parameter = facts.parameters[name]
    return placeholders.make(name, parameter.shape, torch.float32 if parameter.exact else kernels.dtype)


def load_tiered(folder: Path, kernels: KernelSet, packing: Packing, *, limit: int, cache: Path) -> TieredModel:
    """The model in `folder`, with at most `limit` bytes of weights in memory.

    What does not fit is streamed from a packed copy in `cache`, made on first use; bits are those of `load_model`.

    Raises:
        CheckpointError: a fault of the folder, or of the copy.
        OptionError: the limit is too low for any plan, or `cache` can't hold the copy.
    """
    facts = check_checkpoint(folder)
    plan, fixed = plan_copy(facts, kernels, packing)
    units = weight_units(plan)
    residency = choose_residency(units, limit=limit, fixed=fixed, unpacked=packing.copies)
    LOG.info("weights: %s bytes in memory of --weight-memory=%s, %s bytes streamed in each step",
             *(f"{size:,}" for size in (residency.total_bytes, limit, residency.streamed_bytes)))
    if not residency.streamed:
        return TieredModel(model=load_model(folder, kernels), residency=residency, stream=None)
    copy = make_copy(plan, cache)
    resident = _load_resident(copy, residency, packing)
    order = [unit for unit in streaming_order(units) if unit.name in residency.streamed]
    stream = WeightStream(copy, order, buffers=residency.buffers, buffer_bytes=residency.buffer_bytes)
    model = _build(facts, kernels, Tiers(packing, resident, stream), plan.products)
    return TieredModel(model=model, residency=residency, stream=stream)


def plan_copy(facts: CheckpointFacts, kernels: KernelSet, packing: Packing) -> tuple[CopyPlan, int]:
    """What a packed copy of the checkpoint holds, and the bytes of all else that the model keeps in memory."""
    products, fixed = _products(facts, kernels, packing)
    return CopyPlan(source=weights_identity(facts.folder), storage=repr(facts.config.quantization), packing=packing,
                    dtype=kernels.dtype, products=products, tensors=facts.tensors, parameters=facts.parameters), fixed


def weight_units(plan: CopyPlan) -> list[Unit]:
    """What can be read at once: the areas of every layer's file."""
    return [Unit(name=area.name, layer=layer, size=pages(area.size), rank=_rank(area.name))
            for layer, header in plan.headers().items() for area in header.areas]


def _rank(area: str) -> int | None:
    expert = _EXPERT.search(area)
    return int(expert[1]) if expert else None


def _load_resident(copy: PackedCopy, residency: Residency, packing: Packing) -> dict[Product, PackedWeight]:
    """Read each resident area once, into memory of its own."""
    resident: dict[Product, PackedWeight] = {}
    for file in copy.layers.values():
        with closing(DirectFile(file.path)) as source:
            for area in (area for area in file.header.areas if area.name in residency.resident):
                memory = page_memory(pages(area.size))
                source.read(file.begin + area.offset, memoryview(memory))
                file.verify(area, memoryview(memory))
                tensors = area_tensors(memory, area)
                resident |= {product: adopted(packing, product, tensors) for product in copy.products[area.name]}
    return resident


def _build(facts: CheckpointFacts, kernels: KernelSet, tiers: Tiers, products: Sequence[Product]) -> Model:
    """The model over its tiers; the stream ends with it."""
    packed = {name for product in products for name in product.parameters}
    placeholders = Placeholders()
    tiered = TieredKernels(kernels, placeholders, tiers)
    plain = {name: tensor for name, tensor in facts.tensors.items() if name not in packed}
    with TensorReader(plain, facts.parameters, kernels.dtype, kernels.device) as reader:
        def get(name: str) -> Tensor:
            if name in packed:
                return _placeholder(placeholders, facts, name, kernels)
            return reader.get(name)

        model = build_model(facts.config, get, cast(KernelSet, tiered))
    weakref.finalize(tiered, tiers.close)
    return model
