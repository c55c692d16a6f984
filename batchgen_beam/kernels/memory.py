"""Memory for caches and packed weights."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

__all__ = ["zeroed"]

_HUGE = 2 << 20
"""Bytes of a huge page: walking through weights and pages touches as many of these as the processor can remember."""


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros.

    On the CPU they begin at a page of memory, and the system hands them out when they are first touched (torch would
    fill them at once), in huge pages where it has any: a pool of many GiB costs nothing until rows use it.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        area.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(area, dtype=dtype).view(shape)
