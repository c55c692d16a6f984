"""JSON Lines shards as raw rows: one line, one row; a file is never split, so line numbers are true.

Owns the reading of lines (plain or compressed by extension) and of JSON.  Does not know keys or units.
A line that is no JSON object is a row with a problem; blank lines are no rows but count as lines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, NoReturn

import pyarrow as pa

from batchgen_beam.errors import InputError
from batchgen_beam.settings import InputColumns
from batchgen_beam.storage.arrow_values import storable_text
from batchgen_beam.storage.files import open_stored
from batchgen_beam.storage.raw_rows import RawBatch, RawRow, asked_columns

__all__ = ["LINE_EXTENSIONS", "count_lines", "read_lines"]

_NAMES = (".jsonl", ".ndjson")
_CODECS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}
LINE_EXTENSIONS = tuple(name + packed for name in _NAMES for packed in ("", *_CODECS))
"""Extensions of the files that are read as JSON Lines."""

_READ_BYTES = 1 << 20
_BATCH_ROWS = 1000
_BATCH_BYTES = 16 << 20
_LINE_BYTES = 64 << 20
"""Longer lines are not kept in memory: they are rows with a problem."""
_MAX_DEPTH = 64
"""Deeper values can't be walked or pickled safely; no chat message or schema comes near."""
_BOM = b"\xef\xbb\xbf"


@contextmanager
def _opened(uri: str) -> Iterator[BinaryIO | pa.NativeFile]:
    """The file's content, decompressed by Arrow: Beam's own reader takes a truncated archive for a short one."""
    codec = _CODECS.get(uri[uri.rindex(".") :].lower())
    with open_stored(uri) as handle:
        if codec is None:
            yield handle
            return
        with pa.CompressedInputStream(pa.PythonFile(handle, "r"), codec) as stream:
            try:
                yield stream
            except OSError as error:
                raise InputError(f"{uri} is damaged or incomplete: {error}") from error


def _lines(uri: str) -> Iterator[tuple[int, bytes]]:
    """Every line with its number; of one that is too long only the beginning, which is longer than `_LINE_BYTES`."""
    with _opened(uri) as handle:
        number, room = 0, _LINE_BYTES + 1
        parts: list[bytes] = []
        while block := handle.read(_READ_BYTES):
            for index, piece in enumerate(block.split(b"\n")):
                if index:
                    yield number, b"".join(parts)
                    number, parts, room = number + 1, [], _LINE_BYTES + 1
                if room:
                    parts.append(piece[:room])
                    room -= len(parts[-1])
        yield number, b"".join(parts)


def _rows(uri: str) -> Iterator[tuple[int, bytes]]:
    for number, line in _lines(uri):
        if len(line) > _LINE_BYTES:
            yield number, line
        elif content := (line.removeprefix(_BOM) if number == 0 else line).strip():
            yield number, content


def count_lines(uri: str, limit: int) -> int:
    """How many rows the file has, at most `limit`."""
    count = 0
    for _ in _rows(uri):
        if count == limit:
            break
        count += 1
    return count


def read_lines(uri: str, columns: InputColumns, kept: pa.Schema) -> Iterator[RawBatch]:
    """The file's rows in order, in batches of at most 1,000 rows or about 16 MiB.

    A kept column is text: JSON strings as they are, any other value as compact JSON.  Lines need not have the same
    keys: a kept column is null in every line without it, also where that is every line.
    """
    rows: list[RawRow] = []
    keeps: list[list[str | None]] = []
    size = 0
    for number, line in _rows(uri):
        record, problem = _parse(line, number)
        rows.append(_raw_row(number, line, record, problem, columns))
        keeps.append([_kept_text(record.get(name)) for name in kept.names])
        size += len(line)
        if len(rows) == _BATCH_ROWS or size >= _BATCH_BYTES:
            yield RawBatch(rows, _kept_columns(keeps, kept))
            rows, keeps, size = [], [], 0
    if rows:
        yield RawBatch(rows, _kept_columns(keeps, kept))


def _parse(line: bytes, number: int) -> tuple[dict[str, object], str | None]:
    if len(line) > _LINE_BYTES:
        return {}, f"line {number + 1} is longer than {_LINE_BYTES} bytes"
    try:
        record = json.loads(line.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return {}, f"line {number + 1} is not valid JSON: {error}"
    if _nested_deeper(record, _MAX_DEPTH):
        return {}, f"line {number + 1} is nested more than {_MAX_DEPTH} levels deep"
    if not isinstance(record, dict):
        return {}, f"line {number + 1} holds a JSON {type(record).__name__}, not an object"
    return record, None


def _nested_deeper(value: object, limit: int) -> bool:
    level: list[object] = [value]
    for _ in range(limit + 1):
        containers = [item for item in level if isinstance(item, (dict, list))]
        if not containers:
            return False
        level = [part for item in containers for part in (item.values() if isinstance(item, dict) else item)]
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _raw_row(number: int, line: bytes, record: dict[str, object], problem: str | None,
             columns: InputColumns) -> RawRow:
    if problem:
        return RawRow(number, False, None, {}, problem, line)
    asked = asked_columns(columns)
    values = {asked[name]: value for name, value in record.items() if name in asked and value is not None}
    has_id = columns.id in record or columns.id != InputColumns().id
    return RawRow(number, has_id, record.get(columns.id), values)


def _kept_columns(rows: list[list[str | None]], kept: pa.Schema) -> pa.RecordBatch | None:
    if not kept.names:
        return None
    arrays = [pa.array(column, pa.string()).cast(field.type) for column, field in zip(zip(*rows, strict=True), kept,
                                                                                     strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=kept)


def _kept_text(value: object) -> str | None:
    if value is None:
        return None
    return storable_text(value if isinstance(value, str) else json.dumps(value, separators=(",", ":")))
