"""Headers of safetensors files, read and checked without touching a tensor.

Owns the format's own laws (https://github.com/huggingface/safetensors, "Format"): 8 bytes little-endian header length,
a JSON header, then the tensors' bytes without holes.  Does not know models or torch.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen_beam.config.json_files import parse_object
from batchgen_beam.errors import CheckpointError

__all__ = ["TensorFacts", "read_header"]

_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}
_LENGTH = struct.Struct("<Q")
_MOST_HEADER_BYTES = 100_000_000
_LFS_POINTER = b"version https://git-lfs"
_ABOUT_FILE = "__metadata__"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """A stored tensor: `start : end` are bytes of `file`, counted from its beginning."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def parts(self) -> tuple[TensorFacts, ...]:
        """All tensors that are stored for it: itself."""
        return (self,)


def read_header(path: Path) -> dict[str, TensorFacts]:
    """The tensors of a safetensors file by name; a truncated or corrupt file is refused by name."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(len(_LFS_POINTER))
        if head == _LFS_POINTER:
            raise CheckpointError(f"{path} is a Git LFS pointer, not the file; fetch it with `git lfs pull`")
        length = _LENGTH.unpack_from(head)[0] if len(head) >= _LENGTH.size else _MOST_HEADER_BYTES + 1
        if length > min(size - _LENGTH.size, _MOST_HEADER_BYTES):
            raise CheckpointError(f"{path} is truncated or no safetensors file: {size} bytes")
        file.seek(_LENGTH.size)
        header = parse_object(file.read(length), f"{path} is corrupt: its header").values
    base = _LENGTH.size + length
    tensors = {name: _tensor(path, name, entry, base) for name, entry in header.items() if name != _ABOUT_FILE}
    _check_layout(path, tensors, base, size)
    return tensors


def _tensor(path: Path, name: str, entry: Any, base: int) -> TensorFacts:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        bits = _BITS[dtype] * math.prod(shape)
        sound = bits == 8 * (end - start) and start >= 0 and all(type(n) is int and n >= 0 for n in shape)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is corrupt: the header entry of {name} can't be read ({error!r})") from error
    if not sound:
        raise CheckpointError(f"{path} is corrupt: {name} is {dtype} {list(shape)} in bytes {start}:{end}")
    return TensorFacts(name=name, file=path, dtype=dtype, shape=shape, start=base + start, end=base + end)


def _check_layout(path: Path, tensors: dict[str, TensorFacts], base: int, size: int) -> None:
    """Tensors follow one another without holes or overlaps up to the end of the file."""
    end = base
    for tensor in sorted(tensors.values(), key=lambda t: (t.start, t.end)):
        if tensor.start != end:
            raise CheckpointError(f"{path} is corrupt: {tensor.name} begins at byte {tensor.start}, expected {end}")
        end = tensor.end
    if end != size:
        fault = "truncated" if size < end else "corrupt"
        raise CheckpointError(f"{path} is {fault}: its header describes {end} bytes, the file has {size}; "
                              "fetch it again")
