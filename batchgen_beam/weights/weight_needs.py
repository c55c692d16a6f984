"""What a model's weights need in memory, from its parameters' names and shapes alone: no tensor is read.

Which products a model has is found by building it once from placeholders, so that no table beside the model says it.
Owns that, and the cutting into units that can be streamed: a loader and a plan that ask here agree on every byte.  Does
not know files, architectures or limits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from batchgen_beam.config.base import ModelConfig
from batchgen_beam.models.interface import KernelSet
from batchgen_beam.weights.copy_plan import lay_area, products_by_area
from batchgen_beam.weights.loader import build_model
from batchgen_beam.weights.packed_format import pages
from batchgen_beam.weights.packing import Packing, Product
from batchgen_beam.weights.parameter import Parameter
from batchgen_beam.weights.residency import Residency, Unit, choose_residency, least_limit
from batchgen_beam.weights.tiers import Placeholders

__all__ = ["WeightNeeds", "model_products", "placeholder", "weight_needs", "weight_units"]

_EXPERT = re.compile(r"\.experts\.(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightNeeds:
    """The units of a model's weights, and the bytes of all that is in memory beside them.

    `unpacked`: a streamed unit in use takes its size once more.
    """

    units: tuple[Unit, ...]
    fixed: int
    unpacked: bool

    @property
    def total_bytes(self) -> int:
        """All weights in memory."""
        return self.fixed + sum(unit.size for unit in self.units)

    def residency(self, limit: int) -> Residency:
        """What stays in `limit` bytes; `OptionError` where they are fewer than `least`."""
        return choose_residency(self.units, limit=limit, fixed=self.fixed, unpacked=self.unpacked)

    def least(self) -> int:
        """The least limit that there is a residency for."""
        return least_limit(self.units, fixed=self.fixed, unpacked=self.unpacked)


def weight_needs(config: ModelConfig, parameters: Mapping[str, Parameter], kernels: KernelSet,
                 packing: Packing) -> WeightNeeds:
    """Of the model of a configuration, whose `parameters` are given by name."""
    products, fixed = model_products(config, parameters, kernels, packing)
    return WeightNeeds(units=tuple(weight_units(products, packing)), fixed=fixed, unpacked=packing.copies)


def model_products(config: ModelConfig, parameters: Mapping[str, Parameter], kernels: KernelSet,
                   packing: Packing) -> tuple[tuple[Product, ...], int]:
    """What the model packs, in the order of use, and the bytes of all else that it keeps in memory."""
    placeholders = Placeholders()
    recorder = _Recorder(kernels, packing, placeholders)
    model = build_model(config, lambda name: placeholder(placeholders, parameters[name], kernels),
                        cast(KernelSet, recorder))
    kept = placeholders.kept_bytes()
    del model
    return tuple(recorder.products), kept + recorder.exact_bytes


def placeholder(placeholders: Placeholders, parameter: Parameter, kernels: KernelSet) -> Tensor:
    """What stands for a parameter while its model is built."""
    return placeholders.make(parameter.name, parameter.shape, torch.float32 if parameter.exact else kernels.dtype)


def weight_units(products: Sequence[Product], packing: Packing) -> list[Unit]:
    """What can be read at once: the areas of every layer's file."""
    return [Unit(name=name, layer=own[0].layer, size=pages(lay_area(name, own, packing).size), rank=_rank(name))
            for name, own in products_by_area(products).items()]


def _rank(area: str) -> int | None:
    expert = _EXPERT.search(area)
    return int(expert[1]) if expert else None


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
