"""How fast a disk is read past the page cache, as streamed weights are.

Owns the timing and the file that it needs.  Does not know weights.
"""

from __future__ import annotations

import os
import time
import uuid
from contextlib import closing
from pathlib import Path

from batchgen_beam.errors import FatalError, OptionError
from batchgen_beam.weights.direct_file import DirectFile
from batchgen_beam.weights.packed_format import DamagedCopy
from batchgen_beam.weights.page_memory import page_memory

__all__ = ["PIECE_BYTES", "SAMPLE_BYTES", "disk_rate", "read_seconds"]

SAMPLE_BYTES = 256 << 20
"""Size of the file that is written to be read."""

PIECE_BYTES = 8 << 20
"""Bytes of one read."""


def disk_rate(folder: Path) -> float:
    """Bytes/s of reading a file in `folder`, the model cache; `OptionError` where it can't be written or read."""
    place = folder / f".disk-rate-{uuid.uuid4().hex}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with place.open("wb") as file:
            block = os.urandom(PIECE_BYTES)
            for _ in range(SAMPLE_BYTES // PIECE_BYTES):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return SAMPLE_BYTES / read_seconds(place, SAMPLE_BYTES)
    except (OSError, FatalError, DamagedCopy) as error:
        raise OptionError(f"--model-cache: the disk under {folder} can't be timed with {SAMPLE_BYTES:,} bytes: "
                          f"{error}") from None
    finally:
        if place.exists():
            place.unlink()


def read_seconds(path: Path, size: int) -> float:
    """Seconds of reading the first `size` bytes, a multiple of `PIECE_BYTES`; `DamagedCopy` where there are fewer."""
    with closing(DirectFile(path)) as file, memoryview(page_memory(PIECE_BYTES)) as piece:
        started = time.perf_counter()
        for begin in range(0, size, PIECE_BYTES):
            file.read(begin, piece)
        return time.perf_counter() - started
