"""The file format of packed weights: one file for each layer, one page-aligned area for each module of it.

    magic (8 bytes) | length of the header (8) | CRC-32 of the header (4) | header, JSON | zeros up to a page
    areas, each from a page on, in the order of the header; offsets count from the first area

Owns layout, checksums and the reasons to refuse a file.  Checksums have a fixed width, so that the layout is known
before a tensor is read.  Numbers are in the byte order of the machine that wrote them: copies do not travel.  Does not
know models, kernels or how files are read fast.
"""

from __future__ import annotations

import json
import math
import struct
import sys
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from batchgen_beam.errors import CheckpointError

__all__ = ["FORMAT_VERSION", "PAGE", "Area", "DamagedCopy", "PackedHeader", "PackedTensor", "SourceTensor",
           "encode", "pages", "read_packed_header"]

FORMAT_VERSION = 1
PAGE = 4096
"""Direct I/O wants offsets, lengths and memory in multiples of the disk's block, which is at most this."""

LINE = 64
"""Tensors within an area begin at cache lines."""

_MAGIC = b"BGBPACK\n"
_PREAMBLE = struct.Struct("<8sQI")
_MOST_HEADER = 1 << 28


class DamagedCopy(CheckpointError):
    """A packed file is not what was written, or not what is wanted now; it can be made again from the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTensor:
    """A tensor of an area: `offset` bytes from the area's beginning."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """As torch has it."""
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceTensor:
    """A tensor of the checkpoint that a file is made from, and the CRC-32 of its bytes as they were read then."""

    name: str
    file: str
    crc: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """What is read at once: `size` bytes from `offset` on, with their CRC-32; `tensors` by product and number."""

    name: str
    offset: int
    size: int
    crc: str
    tensors: Mapping[str, PackedTensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedHeader:
    """What a file holds.  `source` is the identity of the checkpoint, `packing` the name of the kernels' form."""

    source: str
    packing: str
    dtype: str
    layer: int
    areas: tuple[Area, ...]
    sources: tuple[SourceTensor, ...]
    version: int = FORMAT_VERSION
    byteorder: str = sys.byteorder

    @property
    def data_size(self) -> int:
        """Bytes of all areas, each in whole pages."""
        return sum(pages(area.size) for area in self.areas)

    def without_checksums(self) -> PackedHeader:
        """The same for every content."""
        return replace(self, areas=tuple(replace(area, crc="") for area in self.areas),
                       sources=tuple(replace(source, crc="") for source in self.sources))

    def check(self, wanted: PackedHeader, path: Path) -> None:
        """`DamagedCopy` with the reason unless this is what `wanted` describes, checksums aside."""
        for what, found, need in (("format version", self.version, wanted.version),
                                  ("byte order", self.byteorder, wanted.byteorder),
                                  ("source weights", self.source, wanted.source),
                                  ("packing", self.packing, wanted.packing), ("dtype", self.dtype, wanted.dtype),
                                  ("layer", self.layer, wanted.layer)):
            if found != need:
                raise DamagedCopy(f"{path} is stale: its {what} is {found}, this run needs {need}")
        if self.without_checksums() != wanted.without_checksums():
            raise DamagedCopy(f"{path} is stale: its names or shapes are not those of the model")


def pages(size: int) -> int:
    """The least whole pages of so many bytes, in bytes."""
    return -(-size // PAGE) * PAGE


def encode(header: PackedHeader) -> bytes:
    """The beginning of a file, whole pages; its length does not depend on checksums that are 8 digits long."""
    text = json.dumps(asdict(header), separators=(",", ":")).encode()
    head = _PREAMBLE.pack(_MAGIC, len(text), zlib.crc32(text)) + text
    return head.ljust(pages(len(head)), b"\0")


def read_packed_header(path: Path) -> tuple[PackedHeader, int]:
    """The header, and where the first area begins in the file.

    Raises:
        DamagedCopy: the file is truncated, or no file of this version of the format, or its header has changed since.
        OSError: it can't be read.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_PREAMBLE.size)
        magic, length, crc = _PREAMBLE.unpack(head) if len(head) == _PREAMBLE.size else (b"", 0, 0)
        if magic != _MAGIC or length > min(size, _MOST_HEADER):
            raise DamagedCopy(f"{path} is truncated or no file of packed weights: {size} bytes")
        text = file.read(length)
    if zlib.crc32(text) != crc:
        raise DamagedCopy(f"{path}: its header is damaged (CRC-32 {zlib.crc32(text):08x}, stored {crc:08x})")
    values = json.loads(text)
    if values["version"] != FORMAT_VERSION:
        raise DamagedCopy(f"{path} is stale: its format version is {values['version']}, this run needs "
                          f"{FORMAT_VERSION}")
    header, begin = _decode(values), pages(_PREAMBLE.size + length)
    if begin + header.data_size != size:
        raise DamagedCopy(f"{path} is truncated: {size} bytes of {begin + header.data_size}")
    return header, begin


def _decode(values: Mapping[str, Any]) -> PackedHeader:
    return PackedHeader(**{**values, "areas": tuple(_area(area) for area in values["areas"]),
                           "sources": tuple(SourceTensor(**source) for source in values["sources"])})


def _area(values: Mapping[str, Any]) -> Area:
    tensors = {name: PackedTensor(**{**tensor, "shape": tuple(tensor["shape"])})
               for name, tensor in values["tensors"].items()}
    return Area(**{**values, "tensors": tensors})
