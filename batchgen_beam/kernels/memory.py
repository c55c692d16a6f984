"""Memory for caches and packed weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from batchgen_beam.weights.page_memory import page_memory

__all__ = ["zeroed"]


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros.

    On the CPU they are `page_memory`, where torch would fill them at once: a pool of many GiB costs nothing until rows
    use it.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.frombuffer(page_memory(size), dtype=dtype).view(shape)
