"""A model of a configuration with weights that mean nothing: for timing, where there is no checkpoint or no memory.

Owns the values, and the using again of packed weights once a limit of memory is reached.  Does not know files, or what
is timed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from batchgen_beam.config.base import ModelConfig
from batchgen_beam.models.interface import KernelSet, Model, PackedWeight
from batchgen_beam.weights.loader import build_model
from batchgen_beam.weights.name_tables import expected_parameters

__all__ = ["random_model"]

_SPREAD = 0.02
"""Standard deviation of matrices: what passes through them stays finite."""

_SHIFTS, _STEP = 1 << 16, 7919
"""All matrices are cut from one array, at places that differ: equal ones would know each other's tokens."""


def random_model(config: ModelConfig, kernels: KernelSet, *, seed: int, room: int) -> Model:
    """The model on matrices of normal numbers, norms of 1 and biases of 0.

    Beyond `room` bytes of packed weights one of a shape that is there is used again: the model costs the time of a
    whole one, but not its memory.  Raises `CheckpointError` for a configuration that no model computes.
    """
    parameters = {one.name: (place, one) for place, one in enumerate(expected_parameters(config))}
    longest = max((math.prod(one.shape) for _, one in parameters.values()), default=0)
    normal_N = torch.randn(longest + _SHIFTS, generator=torch.Generator().manual_seed(seed)).to(kernels.dtype) * _SPREAD

    def get(name: str) -> Tensor:
        place, row = parameters[name]
        dtype = torch.float32 if row.exact else kernels.dtype
        if len(row.shape) == 1:
            value = 0.0 if name.endswith((".bias", ".correction")) else 1.0
            return torch.full(row.shape, value, dtype=dtype, device=kernels.device)
        begin = place * _STEP % _SHIFTS
        return normal_N[begin : begin + math.prod(row.shape)].view(row.shape).to(kernels.device, dtype)

    return build_model(config, get, cast(KernelSet, _Recycling(kernels, room)))


class _Recycling:
    """A kernel set that packs no more than `room` bytes, one weight of each form apart."""

    def __init__(self, kernels: KernelSet, room: int) -> None:
        self._kernels = kernels
        self._room = room
        self._packed: dict[object, list[PackedWeight]] = {}
        self._uses: dict[object, int] = {}

    def __getattr__(self, name: str) -> Any:
        """Everything else is the kernel set's."""
        return getattr(self._kernels, name)

    def pack(self, weights: Sequence[Tensor], *, biases: Sequence[Tensor] | None = None) -> PackedWeight:
        """A weight of these shapes."""
        size = sum(weight.nbytes for weight in weights)
        form = tuple(tuple(weight.shape) for weight in weights), biases is not None
        known = self._packed.setdefault(form, [])
        if known and size > self._room:
            self._uses[form] = self._uses.get(form, -1) + 1
            return known[self._uses[form] % len(known)]
        self._room -= size
        known.append(self._kernels.pack(weights, biases=biases))
        return known[-1]
