"""A limit on all memory of a process and of what it caches of files, where this machine lets us set one.

Owns a control group for each run (`memory.max` of version 2, `memory.limit_in_bytes` of version 1), which counts page
cache too, and lets nothing be swapped beside it where the kernel counts swap.  Where none can be made the group is
None, and the caller has to say that nothing was enforced.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["MemoryGroup", "memory_group"]

_ROOT = Path("/sys/fs/cgroup")
_PATIENCE = 10.0
"""Seconds that the kernel may take to let go of a group whose processes have ended."""


class MemoryGroup:
    """A group that processes enter; `peak` is the most that it held at once, cached pages of files included."""

    def __init__(self, folder: Path, peak: str) -> None:
        self._folder = folder
        self._peak = peak

    def enter(self) -> None:
        """Move the calling process in; meant for the moment between fork and exec."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))

    def peak(self) -> int | None:
        """Bytes, or None where this kernel does not say."""
        try:
            return int((self._folder / self._peak).read_text())
        except OSError:
            return None


@contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup | None]:
    """A new group of at most `limit` bytes, or None; it is removed at the end, when its processes must have ended."""
    first = (_ROOT / "memory", "memory.limit_in_bytes", "memory.max_usage_in_bytes",
             ("memory.memsw.limit_in_bytes", limit))  # of memory and swap together
    second = (_ROOT, "memory.max", "memory.peak", ("memory.swap.max", 0))
    for root, knob, peak, (swap, swap_limit) in (first, second):
        folder = root / f"offload-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if (folder / knob).exists():
                (folder / knob).write_text(str(limit))
                if (folder / swap).exists():
                    (folder / swap).write_text(str(swap_limit))
                yield MemoryGroup(folder, peak)
                return
        finally:
            _remove(folder)
    yield None


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + _PATIENCE
    while folder.exists():
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
