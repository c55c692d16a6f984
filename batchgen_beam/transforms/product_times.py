"""How long products and the disk take on this machine, measured in a second or two and then remembered.

For whoever can't wait until the layers of a model have been timed (`machine_times`).  Owns the measurement and its
file.  Does not know models or plans.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from batchgen_beam.kernels.choice import machine_digest
from batchgen_beam.kernels.remembered import remembered
from batchgen_beam.models.interface import KernelSet
from batchgen_beam.weights.disk_rate import disk_rate

__all__ = ["ProductTimes", "product_times"]

VERSION = 1
"""Raised when figures of an older release say something else."""

TOKENS = (1, 16, 64, 256)
SIZE = 2048
COUNT = 8
"""Square weights of so many inputs: together more than processors keep."""

REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductTimes:
    """Seconds of a product for each byte of its weights, by tokens, and what the disk gives, bytes/s."""

    seconds: dict[int, float]
    disk: float

    @classmethod
    def from_json(cls, source: Mapping[str, Any]) -> ProductTimes:
        """What `asdict` gave, read from JSON; `ValueError`, `KeyError` or `TypeError` where it is something else."""
        seconds = dict(source["seconds"])
        return cls(seconds={int(tokens): float(one) for tokens, one in seconds.items()}, disk=float(source["disk"]))


def product_times(kernels: KernelSet, cache: Path, *,
                  clock: Callable[[], float] = time.perf_counter) -> ProductTimes:
    """Read from `cache` where they were measured before, for the same machine, kernels and threads."""
    return remembered(cache / f"product-times-{_digest(kernels)}.json",
                      lambda: ProductTimes(seconds=_measure(kernels, clock), disk=disk_rate(cache)),
                      to_json=asdict, from_json=ProductTimes.from_json)


def _digest(kernels: KernelSet) -> str:
    facts = {"version": VERSION, "machine": machine_digest(), "kernels": dict(kernels.facts()),
             "threads": kernels.threads}
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


@torch.inference_mode()
def _measure(kernels: KernelSet, clock: Callable[[], float]) -> dict[int, float]:
    normal_NK = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    plain_NK = normal_NK.to(kernels.device, kernels.dtype)
    weights = [kernels.pack([plain_NK]) for _ in range(COUNT)]
    found = {}
    for tokens in TOKENS:
        x_TK = torch.ones(tokens, SIZE, dtype=kernels.dtype, device=kernels.device)
        seconds = []
        for _ in range(1 + REPEATS):
            began = clock()
            for weight in weights:
                kernels.linear(x_TK, weight)
            seconds.append(clock() - began)
        found[tokens] = statistics.median(seconds[1:]) / (COUNT * plain_NK.nbytes)
    return found
