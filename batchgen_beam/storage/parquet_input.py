"""Parquet shards as raw rows: footers, the columns that matter, one row group at a time.

Owns how Arrow values become Python values.  Does not know keys, units or parameters' meaning.  Types are read as
they come: null, string, large_string, string_view and dictionary columns give the same values; nothing is inferred.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen_beam.errors import InputError
from batchgen_beam.settings import InputColumns
from batchgen_beam.storage.files import open_stored
from batchgen_beam.storage.raw_rows import RawBatch, RawRow, asked_columns

__all__ = ["ParquetFooter", "kept_types", "read_footer", "read_row_group"]

_READ_BUFFER = 1 << 20
"""Column chunks are streamed through buffers of this size, so that memory does not follow the row group."""
_BATCH_ROWS = 1000
_BATCH_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class ParquetFooter:
    """What a footer says: the schema, the rows of each row group and the uncompressed bytes of the needed columns."""

    schema: pa.Schema
    rows: tuple[int, ...]
    needed_bytes: tuple[int, ...]


@contextmanager
def _opened(uri: str) -> Iterator[pq.ParquetFile]:
    with open_stored(uri) as handle:
        try:
            with pq.ParquetFile(handle, pre_buffer=False, buffer_size=_READ_BUFFER) as file:
                yield file
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{uri} can't be read as Parquet: {error}") from error


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
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    is_uuid = getattr(kind, "extension_name", "") == "arrow.uuid"
    return text or is_uuid or pa.types.is_integer(kind) or pa.types.is_null(kind)


def read_row_group(uri: str, row_group: int, columns: InputColumns, kept: pa.Schema) -> Iterator[RawBatch]:
    """The rows of one row group in order, in small batches of the needed columns only.

    `kept` gives the types of the kept columns; a column that this file lacks is null.
    """
    with _opened(uri) as file:
        needed = _needed(file.schema_arrow, columns)
        group = file.metadata.row_group(row_group)
        size = _batch_rows(group.num_rows, _needed_bytes(group, set(needed)))
        start = 0
        for batch in file.iter_batches(batch_size=size, row_groups=[row_group], columns=needed):
            yield RawBatch(_raw_rows(batch, start, columns), _kept_columns(batch, kept))
            start += batch.num_rows


def _batch_rows(rows: int, size: int) -> int:
    return max(1, min(_BATCH_ROWS, _BATCH_BYTES * rows // max(size, 1)))


def _raw_rows(batch: pa.RecordBatch, start: int, columns: InputColumns) -> list[RawRow]:
    asked = asked_columns(columns)
    present = [(asked[name], _values(batch.column(name))) for name in batch.schema.names if name in asked]
    has_id = columns.id in batch.schema.names
    ids = _values(batch.column(columns.id)) if has_id else [None] * batch.num_rows
    return [
        RawRow(start + i, has_id, ids[i], {name: values[i] for name, values in present if values[i] is not None})
        for i in range(batch.num_rows)
    ]


def _kept_columns(batch: pa.RecordBatch, kept: pa.Schema) -> pa.RecordBatch | None:
    if not kept.names:
        return None
    arrays = [_kept_array(batch, field) for field in kept]
    return pa.RecordBatch.from_arrays(arrays, schema=kept)


def _kept_array(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    if field.name not in batch.schema.names or pa.types.is_null(batch.column(field.name).type):
        return pa.nulls(batch.num_rows, field.type)
    column = batch.column(field.name)
    return column if column.type.equals(field.type) else column.cast(field.type)


def _values(column: pa.Array) -> list[object]:
    """Python values of a column.

    Arrow can't tell an absent struct field from a null one: null fields are left out, as JSON would leave them.
    Bytes in a text column that are not UTF-8 become lone surrogates, which the row's check then refuses by name.
    """
    try:
        values: list[object] = column.to_pylist()
    except UnicodeDecodeError:
        values = [_lenient(scalar) for scalar in column]
    return [_without_nulls(value) for value in values] if pa.types.is_nested(column.type) else values


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list):
        if value and all(isinstance(item, tuple) for item in value):
            return _without_nulls(dict(value))
        return [_without_nulls(item) for item in value]
    return value


def _lenient(scalar: pa.Scalar) -> object:
    if not scalar.is_valid:
        return None
    if isinstance(scalar, (pa.StringScalar, pa.LargeStringScalar, pa.StringViewScalar)):
        return scalar.as_buffer().to_pybytes().decode("utf-8", "surrogateescape")
    if isinstance(scalar, pa.DictionaryScalar):
        return _lenient(scalar.value)
    if isinstance(scalar, pa.MapScalar):
        return [tuple(_lenient(part) for part in entry.values()) for entry in scalar.values]
    if isinstance(scalar, pa.ListScalar):
        return [_lenient(item) for item in scalar.values]
    if isinstance(scalar, pa.StructScalar):
        return {name: _lenient(item) for name, item in scalar.items()}
    return scalar.as_py()


def kept_types(footers: Sequence[tuple[str, pa.Schema]], keep: Sequence[str]) -> pa.Schema:
    """One type for each kept column over all files, so that results of different shards can be read together.

    Dictionary columns are kept as their values, every kind of text as `string`; a column that is null or absent in a
    file takes the others' type.  An `InputError` names a column that no file has, or whose types do not go together.
    """
    return pa.schema([_kept_field(footers, name) for name in keep])


def _kept_field(footers: Sequence[tuple[str, pa.Schema]], name: str) -> pa.Field:
    kinds = [(uri, _value_type(schema.field(name).type)) for uri, schema in footers if name in schema.names]
    if not kinds:
        raise InputError(f"no input file has the column {name!r}, which should be kept")
    merged = pa.schema([pa.field(name, kinds[0][1])])
    for uri, kind in kinds:
        try:
            merged = pa.unify_schemas([merged, pa.schema([pa.field(name, kind)])], promote_options="permissive")
        except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
            raise InputError(f"kept column {name!r} is {kind} in {uri} and {merged.field(name).type} elsewhere; "
                             "convert one of them, or do not keep it") from error
    return pa.field(name, merged.field(name).type)


def _value_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.string() if pa.types.is_large_string(kind) or pa.types.is_string_view(kind) else kind
