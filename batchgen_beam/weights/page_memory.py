"""Memory of whole pages, asked of the operating system itself.

Owns how large areas are mapped.  Does not know what lies in them.
"""

from __future__ import annotations

import mmap

__all__ = ["page_memory"]

_HUGE = 2 << 20
"""Bytes of a huge page: walking through weights and pages touches as many of these as the processor can remember."""


def page_memory(size: int) -> mmap.mmap:
    """So many zero bytes that begin at a page, in huge pages where the system has any.

    The system hands them out when they are first touched.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
