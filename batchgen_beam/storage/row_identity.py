"""What a row is called: its id, and the digest of what decides its answer.

Owns the encodings behind them, which are durable: a change makes old outputs unrecognisable.
Does not know Arrow, Beam or where values come from.
"""

from __future__ import annotations

import hashlib
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence

from batchgen_beam.settings import FLOAT_COLUMNS

__all__ = ["RowsDigest", "is_unicode", "positional_id", "row_digest", "row_id"]


def positional_id(uri: str, row_group: int, row: int) -> str:
    """The id of a row that brings none: a UUIDv5 of its full normalised URI, row group and row."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"{uri}#row_group={row_group},row={row}"))


def row_id(value: object, column: str) -> str:
    """The text of an id: text as it is, integers in decimal, UUIDs in their usual form.

    A `ValueError` says why a value is no id (null, empty, not Unicode, of another type).
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, uuid.UUID):
        return str(value)
    if value is None or value == "":
        raise ValueError(f"column {column!r} is {'null' if value is None else 'empty'}, it must identify the row")
    if not isinstance(value, str):
        raise ValueError(f"column {column!r} must be text or an integer, got {type(value).__name__}")
    if not is_unicode(value):
        raise ValueError(f"column {column!r} is not valid Unicode text")
    return value


def is_unicode(text: str) -> bool:
    """Whether the text can be encoded as UTF-8 (holds no lone surrogate)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def row_digest(values: Mapping[str, object]) -> str:
    """SHA-256 (64 hex digits) of the columns that decide the answer.

    Every value is written with a type tag and its length, so that no two different rows share an encoding; the order
    of keys does not count.  In `FLOAT_COLUMNS` 1 and 1.0 are the same; elsewhere integer and float differ.
    """
    sha = hashlib.sha256()
    for part in _encode({name: _as_read(name, value) for name, value in values.items()}):
        sha.update(part)
    return sha.hexdigest()


class RowsDigest:
    """SHA-256 of consecutive rows of one file: where each stands, its key and the values that results keep of it."""

    def __init__(self) -> None:
        self._sha = hashlib.sha256()

    def add(self, row: int, key: str, kept: Sequence[object]) -> None:
        """The next row; every row has as many kept values."""
        text = key.encode("utf-8", "surrogatepass")
        self._sha.update(b"%d,%d:%s" % (row, len(text), text))
        for value in kept:
            for part in _encode(value):
                self._sha.update(part)

    def hexdigest(self, kept: str) -> str:
        """64 hex digits; `kept` says how the kept columns are named and typed."""
        sha = self._sha.copy()
        sha.update(kept.encode())
        return sha.hexdigest()


def _as_read(name: str, value: object) -> object:
    if name in FLOAT_COLUMNS and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return value
    return value


def _encode(value: object) -> Iterator[bytes]:
    match value:
        case None:
            yield b"n"
        case bool():
            yield b"t" if value else b"f"
        case int():
            yield _sized(b"i", hex(value).encode())
        case float():
            yield b"d" + struct.pack(">d", value)
        case str():
            yield _sized(b"s", value.encode("utf-8", "surrogatepass"))
        case bytes():
            yield _sized(b"b", value)
        case Mapping():
            yield from _encode_mapping(value)
        case Sequence():
            yield b"l%d:" % len(value)
            for item in value:
                yield from _encode(item)
        case _:
            yield _sized(b"o", f"{type(value).__name__}:{value}".encode("utf-8", "surrogatepass"))


def _encode_mapping(value: Mapping[object, object]) -> Iterator[bytes]:
    entries = sorted(((b"".join(_encode(key)), item) for key, item in value.items()), key=_first)
    yield b"m%d:" % len(entries)
    for key, item in entries:
        yield key
        yield from _encode(item)


def _first(entry: tuple[bytes, object]) -> bytes:
    return entry[0]


def _sized(tag: bytes, body: bytes) -> bytes:
    return b"%s%d:%s" % (tag, len(body), body)
