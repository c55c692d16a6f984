"""Parquet shards as raw rows: footers, the columns that matter, one row group at a time.

Owns the reading of files.  Does not know keys, units or parameters' meaning.  Types are read as they come: null,
string, large_string, string_view and dictionary columns give the same values; nothing is inferred.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import SEEK_END
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen_beam.errors import InputError
from batchgen_beam.settings import InputColumns
from batchgen_beam.storage.arrow_values import has_text_dictionary, is_text, python_values
from batchgen_beam.storage.files import open_stored
from batchgen_beam.storage.kept_columns import kept_columns
from batchgen_beam.storage.raw_rows import RawBatch, RawRow, asked_columns

__all__ = ["ParquetFooter", "read_footer", "read_row_group"]

_READ_BUFFER = 1 << 20
"""Column chunks are streamed through buffers of this size, so that memory does not follow the row group."""
_BATCH_ROWS = 1000
_BATCH_BYTES = 16 << 20
_MESSAGE_CHARS = 300
_TAIL_BYTES = 8
"""A file ends with its footer's length and the magic of its beginning, 4 bytes each."""
_SCHEMA_KEY = b"ARROW:schema"


@dataclass(frozen=True, slots=True)
class ParquetFooter:
    """What a footer says: the schema, the rows of each row group and the uncompressed bytes of the needed columns."""

    schema: pa.Schema
    rows: tuple[int, ...]
    needed_bytes: tuple[int, ...]


@contextmanager
def _opened(uri: str, *, row_group: int | None = None, plain: bool = False) -> Iterator[pq.ParquetFile]:
    """The file; what is wrong with it, or with the row group that is read, is one line.

    `plain` reads by the types of Parquet itself, without those that the writer had in memory.
    """
    try:
        with open_stored(uri) as handle:
            metadata = _plain_metadata(handle) if plain else None
            with pq.ParquetFile(handle, metadata=metadata, pre_buffer=False, buffer_size=_READ_BUFFER) as file:
                yield file
    except (pa.ArrowException, OSError) as error:
        where = "" if row_group is None else f" in row group {row_group}"
        raise InputError(f"{uri} can't be read as Parquet{where}: {_first_line(error)}; write the file again, or leave "
                         "it out") from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:_MESSAGE_CHARS]


def _plain_metadata(handle: BinaryIO) -> pq.FileMetaData:
    """The footer with the writer's Arrow schema under another key, where no reader looks for it."""
    handle.seek(-_TAIL_BYTES, SEEK_END)
    tail = handle.read(_TAIL_BYTES)
    size = int.from_bytes(tail[:4], "little")
    handle.seek(-_TAIL_BYTES - size, SEEK_END)
    before, key, after = handle.read(size).rpartition(_SCHEMA_KEY)
    handle.seek(0)
    hidden = key.lower()
    return pq.read_metadata(pa.BufferReader(tail[4:] + before + hidden + after + tail))


def read_footer(uri: str, columns: InputColumns) -> ParquetFooter:
    """The footer of a file, its columns checked: an `InputError` names the file and what is missing or doubled."""
    with _opened(uri) as file:
        schema, metadata = file.schema_arrow, file.metadata
        _check_columns(uri, schema, columns)
        needed = set(_needed(schema, columns))
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        return ParquetFooter(
            schema=schema, rows=tuple(group.num_rows for group in groups),
            needed_bytes=tuple(_needed_bytes(group, needed) for group in groups))


def _needed_bytes(group: pq.RowGroupMetaData, needed: set[str]) -> int:
    chunks = (group.column(i) for i in range(group.num_columns))
    return sum(c.total_uncompressed_size for c in chunks if c.path_in_schema.split(".")[0] in needed)


def _needed(schema: pa.Schema, columns: InputColumns) -> list[str]:
    wanted = dict.fromkeys([columns.id, *asked_columns(columns), *columns.keep])
    return [name for name in wanted if name in schema.names]


def _check_columns(uri: str, schema: pa.Schema, columns: InputColumns) -> None:
    questions = (columns.prompt, columns.messages, columns.token_ids)
    if not any(name in schema.names for name in questions):
        raise InputError(f"{uri} has none of the columns {', '.join(map(repr, questions))}; "
                         f"it has {', '.join(map(repr, schema.names))}. Name yours with the column options")
    if columns.id not in schema.names and columns.id != InputColumns().id:
        raise InputError(f"{uri} has no column {columns.id!r}, which should identify its rows")
    doubled = [name for name in _needed(schema, columns) if schema.names.count(name) > 1]
    if doubled:
        raise InputError(f"{uri} has more than one column named {doubled[0]!r}")
    if columns.id in schema.names and not _can_identify(schema.field(columns.id).type):
        raise InputError(f"{uri}: column {columns.id!r} of type {schema.field(columns.id).type} can't identify rows; "
                         "it must be text, integers or UUIDs")


def _can_identify(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    is_uuid = getattr(kind, "extension_name", "") == "arrow.uuid"
    return is_text(kind) or is_uuid or pa.types.is_integer(kind) or pa.types.is_null(kind)


def read_row_group(uri: str, row_group: int, columns: InputColumns, kept: pa.Schema) -> Iterator[RawBatch]:
    """The rows of one row group in order, in small batches of the needed columns only.

    `kept` gives the types of the kept columns; a column that this file lacks is null.
    """
    with _opened(uri, row_group=row_group) as file:
        needed = _needed(file.schema_arrow, columns)
        group = file.metadata.row_group(row_group)
        size = _batch_rows(group.num_rows, _needed_bytes(group, set(needed)))
        start = 0
        for batch in _batches(uri, file, row_group, needed, size):
            yield RawBatch(_raw_rows(batch, start, columns), kept_columns(batch, kept))
            start += batch.num_rows


def _batches(uri: str, file: pq.ParquetFile, row_group: int, names: list[str], size: int) -> Iterator[pa.RecordBatch]:
    """The named columns.  Arrow reads no dictionary with a text that is not UTF-8: those come as plain text."""
    schema = file.schema_arrow
    texts = [name for name in names if has_text_dictionary(schema.field(name).type)]
    others = [name for name in names if name not in texts]
    if not texts:
        yield from file.iter_batches(batch_size=size, row_groups=[row_group], columns=others)
        return
    with _opened(uri, row_group=row_group, plain=True) as plain:
        found = plain.iter_batches(batch_size=size, row_groups=[row_group], columns=texts)
        if not others:
            yield from found
            return
        for one, two in zip(file.iter_batches(batch_size=size, row_groups=[row_group], columns=others), found,
                            strict=True):
            yield pa.RecordBatch.from_arrays([*one.columns, *two.columns], names=[*one.schema.names, *two.schema.names])


def _batch_rows(rows: int, size: int) -> int:
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES * rows // max(size, 1)))


def _raw_rows(batch: pa.RecordBatch, start: int, columns: InputColumns) -> list[RawRow]:
    asked = asked_columns(columns)
    present = [(asked[name], python_values(batch.column(name))) for name in batch.schema.names if name in asked]
    has_id = columns.id in batch.schema.names
    ids = python_values(batch.column(columns.id)) if has_id else [None] * batch.num_rows
    return [
        RawRow(start + i, has_id, ids[i], {name: values[i] for name, values in present if values[i] is not None})
        for i in range(batch.num_rows)
    ]
