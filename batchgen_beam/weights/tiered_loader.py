"""A model whose weights do not all fit into memory: planned, its packed copy made, resident weights read, the rest
streamed.

Owns the order of these steps.  Does not know architectures, kernels or flags.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from torch import Tensor

from batchgen_beam.models.interface import KernelSet, Model, PackedWeight
from batchgen_beam.weights.checkpoint import CheckpointFacts, check_checkpoint
from batchgen_beam.weights.copy_plan import CopyPlan
from batchgen_beam.weights.direct_file import DirectFile
from batchgen_beam.weights.freed_memory import return_freed
from batchgen_beam.weights.identity import weights_identity
from batchgen_beam.weights.loader import TensorReader, build_model, load_model
from batchgen_beam.weights.packed_copy import PackedCopy, make_copy
from batchgen_beam.weights.packed_format import pages
from batchgen_beam.weights.packing import Packing, Product
from batchgen_beam.weights.page_memory import page_memory
from batchgen_beam.weights.residency import Residency, streaming_order
from batchgen_beam.weights.tiers import Placeholders, TieredKernels, Tiers, adopted
from batchgen_beam.weights.weight_needs import WeightNeeds, model_products, placeholder, weight_units
from batchgen_beam.weights.weight_stream import StreamStats, WeightStream, area_tensors

__all__ = ["TieredModel", "load_tiered", "plan_copy"]

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredModel:
    """A model, where its weights are, and the stream of those that are not in memory (None: all are)."""

    model: Model
    residency: Residency
    stream: WeightStream | None

    def streamed(self) -> StreamStats | None:
        """What the stream has done so far."""
        return None if self.stream is None else self.stream.stats()


def load_tiered(folder: Path, kernels: KernelSet, packing: Packing, *, limit: int, cache: Path) -> TieredModel:
    """The model in `folder`, with at most `limit` bytes of weights in memory.

    What does not fit is streamed from a packed copy in `cache`, made on first use; bits are those of `load_model`.

    Raises:
        CheckpointError: a fault of the folder, or of the copy.
        OptionError: the limit is too low for any plan, or `cache` can't hold the copy.
    """
    facts = check_checkpoint(folder)
    plan, needs = plan_copy(facts, kernels, packing)
    residency = needs.residency(limit)
    LOG.info("weights: %s bytes in memory of --weight-memory=%s, %s bytes streamed in each step",
             *(f"{size:,}" for size in (residency.total_bytes, limit, residency.streamed_bytes)))
    if not residency.streamed:
        return TieredModel(model=load_model(folder, kernels), residency=residency, stream=None)
    copy = make_copy(plan, cache)
    return_freed()  # what the self-test of kernels took, too
    resident = _load_resident(copy, residency, packing)
    order = [unit for unit in streaming_order(needs.units) if unit.name in residency.streamed]
    stream = WeightStream(copy, order, buffers=residency.buffers, buffer_bytes=residency.buffer_bytes)
    model = _build(facts, kernels, Tiers(packing, resident, stream), plan.products)
    return TieredModel(model=model, residency=residency, stream=stream)


def plan_copy(facts: CheckpointFacts, kernels: KernelSet, packing: Packing) -> tuple[CopyPlan, WeightNeeds]:
    """What a packed copy of the checkpoint holds, and what the model needs in memory."""
    products, fixed = model_products(facts.config, facts.parameters, kernels, packing)
    plan = CopyPlan(source=weights_identity(facts.folder), storage=repr(facts.config.quantization), packing=packing,
                    dtype=kernels.dtype, products=products, tensors=facts.tensors, parameters=facts.parameters)
    return plan, WeightNeeds(units=tuple(weight_units(products, packing)), fixed=fixed, unpacked=packing.copies)


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
                return placeholder(placeholders, facts.parameters[name], kernels)
            return reader.get(name)

        model = build_model(facts.config, get, cast(KernelSet, tiered))
    weakref.finalize(tiered, tiers.close)
    return model
