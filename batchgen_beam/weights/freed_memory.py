"""What a process has freed and its allocator keeps.  Knows the GNU allocator; another is left alone."""

from __future__ import annotations

import ctypes

__all__ = ["return_freed"]


def return_freed() -> None:
    """Give back to the system what was freed: the GNU allocator keeps blocks of up to 32 MiB for later, and any number
    of them."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
