"""The durable form of a record: magic, version, a JSON header, then arrays of 4-byte items, all little-endian.

Owns the layout.  Does not know what the facts and arrays mean, nor where the bytes are kept.  The bits of floats in
arrays are kept as they are, NaNs included; floats in the header come back equal.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

__all__ = ["RecordFormat"]

_HEADER = struct.Struct("<4sHI")
_LENGTHS = "lengths"


@dataclass(frozen=True, slots=True)
class RecordFormat:
    """One kind of record: its name in messages, 4 bytes of magic, its version and the type codes of its arrays."""

    name: str
    magic: bytes
    version: int
    codes: str

    def pack(self, facts: Mapping[str, object], arrays: Sequence[array[Any]]) -> bytes:
        """Facts are values of JSON; the arrays have this format's type codes."""
        header = json.dumps({**facts, _LENGTHS: [len(part) for part in arrays]}).encode()
        body = b"".join(_swapped(part.typecode, part.tobytes()).tobytes() for part in arrays)
        return _HEADER.pack(self.magic, self.version, len(header)) + header + body

    def unpack(self, data: bytes) -> tuple[dict[str, Any], list[array[Any]]]:
        """The inverse of `pack`; a `ValueError` names what is wrong (not a record, version, truncated, header)."""
        header, body = self._split(data)
        try:
            facts: dict[str, Any] = json.loads(header)
            ends = list(accumulate((4 * length for length in facts.pop(_LENGTHS)), initial=0))
        except (KeyError, TypeError, AttributeError) as error:
            raise self.foreign(error) from error
        if ends[-1] != len(body) or len(ends) != len(self.codes) + 1:
            raise ValueError(f"{self.name} holds {len(body)} bytes of arrays, its header says {ends[-1]}")
        parts = [body[start:end] for start, end in pairwise(ends)]
        return facts, [_swapped(code, part) for code, part in zip(self.codes, parts, strict=True)]

    def foreign(self, error: Exception) -> ValueError:
        """What to raise where the header does not say what such a record says."""
        return ValueError(f"{self.name} with a foreign header: {error!r}")

    def _split(self, data: bytes) -> tuple[bytes, bytes]:
        if len(data) < _HEADER.size or data[:4] != self.magic:
            raise ValueError(f"not a {self.name}")
        _, version, length = _HEADER.unpack_from(data)
        if version != self.version:
            raise ValueError(f"{self.name} of version {version}, this release reads {self.version}")
        end = _HEADER.size + length
        if len(data) < end:
            raise ValueError(f"{self.name} is truncated")
        return data[_HEADER.size : end], data[end:]


def _swapped(code: str, data: bytes) -> array[Any]:
    """`data`, which is little-endian, in this machine's byte order; its own inverse on bytes."""
    into = array(code)
    into.frombytes(data)
    if sys.byteorder == "big":
        into.byteswap()
    return into
