"""Writes one float32 safetensors file piece by piece, so that no more than a piece is in memory.

Owns the format's writing side (https://github.com/huggingface/safetensors, "Format").  Does not know what the tensors
mean.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["StoredTensor", "write_float32"]

_ALIGNMENT = 8
_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor to be written: `pieces()` gives its elements in row-major order, cut anywhere."""

    name: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[NDArray[np.float32]]]


def write_float32(path: Path, tensors: Sequence[StoredTensor]) -> None:
    """Write `tensors` in the order given.  A tensor whose pieces do not add up to its shape is our own mistake."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + _BYTES * math.prod(tensor.shape)
        header[tensor.name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            written = sum(file.write(piece.astype("<f4", copy=False).tobytes()) for piece in tensor.pieces())
            assert written == _BYTES * math.prod(tensor.shape), tensor.name
