"""A file read past the page cache into page-aligned memory.

Owns direct I/O and the way back where a file system has none (some of memory, of containers, of networks): then reads
go through the page cache, and `direct` is False.  Does not know what is in the file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from batchgen_beam.errors import FatalError
from batchgen_beam.weights.packed_format import DamagedCopy

__all__ = ["DirectFile"]

BLOCK = 8 << 20
"""Bytes of one read: large enough for the disk's full rate, small enough to stop soon."""

_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFile:
    """One open file.  Reads wait for the disk without holding the interpreter; a `FatalError` names what can't be."""

    def __init__(self, path: Path, *, open_file: Callable[[Path, int], int] = os.open) -> None:
        self.path = path
        self.direct = bool(_DIRECT)
        self._open = open_file
        self._descriptor: int | None = None
        try:
            self._descriptor = open_file(path, os.O_RDONLY | _DIRECT)
        except OSError as error:
            self._go_back_after(error)

    def read(self, offset: int, target: memoryview, go_on: Callable[[], bool] = lambda: True) -> bool:
        """Fill `target` from `offset` on; both, and the target's address, are multiples of a page.

        False if `go_on` said no between two blocks.  `DamagedCopy` where the file ends before.
        """
        done = 0
        while done < len(target):
            if not go_on():
                return False
            count = self._read_block(offset + done, target[done:done + BLOCK])
            if not count:
                raise DamagedCopy(f"{self.path} ends at byte {offset + done}, {len(target) - done} too early")
            done += count
        return True

    def _read_block(self, offset: int, block: memoryview) -> int:
        assert self._descriptor is not None, "read after close"
        try:
            return os.preadv(self._descriptor, [block], offset)
        except OSError as error:
            self._go_back_after(error)
            return self._read_block(offset, block)

    def _go_back_after(self, error: OSError) -> None:
        """To the page cache, if it is direct I/O that the file system refuses."""
        if error.errno != errno.EINVAL or not self.direct:
            raise FatalError(f"{self.path} can't be read: {error.strerror or error}") from error
        self.close()
        self.direct = False
        try:
            self._descriptor = self._open(self.path, os.O_RDONLY)
        except OSError as other:
            self._go_back_after(other)

    def close(self) -> None:
        """Give the descriptor back; once is enough, twice no fault."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
