"""Models of tiny checkpoints under a weight limit, by how much of them is streamed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from batchgen_beam.errors import OptionError
from batchgen_beam.kernels.packing import packing_of
from batchgen_beam.models.interface import KernelSet
from batchgen_beam.weights.tiered_loader import TieredModel, load_tiered

__all__ = ["ALL", "least_limit", "tiered"]

ALL = 1 << 60
"""A limit that no model meets."""


def least_limit(folder: Path, kernels: KernelSet, cache: Path) -> int:
    """What a refusal says that the model needs at least."""
    with pytest.raises(OptionError) as refused:
        load_tiered(folder, kernels, packing_of(kernels), limit=1, cache=cache)
    found = re.search(r"at least ([\d,]+) bytes", str(refused.value))
    assert found is not None
    return int(found[1].replace(",", ""))


def tiered(folder: Path, kernels: KernelSet, cache: Path, *, share: float = 0.0) -> TieredModel:
    """Between the least limit (0) and all in memory (1)."""
    packing = packing_of(kernels)
    least = least_limit(folder, kernels, cache)
    whole = load_tiered(folder, kernels, packing, limit=ALL, cache=cache).residency.total_bytes
    return load_tiered(folder, kernels, packing, limit=round(least + (whole - least) * share), cache=cache)
