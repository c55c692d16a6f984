"""The columns that results keep from the input: one type over all files, which holds every file's values.

Owns which types go together.  Does not know where the columns are read from or written to.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from batchgen_beam.errors import InputError
from batchgen_beam.storage.arrow_values import is_text, storable_column

__all__ = ["kept_columns", "kept_types"]

_MANTISSA_BITS = {16: 11, 32: 24, 64: 53}
"""Width of a floating-point type -> the bits of the integers that it holds exactly."""


def kept_columns(batch: pa.RecordBatch, kept: pa.Schema) -> pa.RecordBatch | None:
    """The kept columns of a batch; one that it lacks is null, and bytes that are no text are escaped."""
    if not kept.names:
        return None
    return pa.RecordBatch.from_arrays([_kept_array(batch, field) for field in kept], schema=kept)


def _kept_array(batch: pa.RecordBatch, field: pa.Field) -> pa.Array:
    if field.name not in batch.schema.names or pa.types.is_null(batch.column(field.name).type):
        return pa.nulls(batch.num_rows, field.type)
    column = batch.column(field.name)
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    column = storable_column(column)
    return column if column.type.equals(field.type) else column.cast(field.type)


def kept_types(footers: Sequence[tuple[str, pa.Schema]], keep: Sequence[str]) -> pa.Schema:
    """One type for each kept column over all files, so that results of different shards can be read together.

    Dictionary columns are kept as their values, every kind of text as `string`; a column that is null or absent in a
    file takes the others' type.  An `InputError` names a column that no file has, or whose types do not go together:
    every value of every file must be the same value in the common type.
    """
    return pa.schema([_kept_field(footers, name) for name in keep])


def _kept_field(footers: Sequence[tuple[str, pa.Schema]], name: str) -> pa.Field:
    kinds = [(uri, _value_type(schema.field(name).type)) for uri, schema in footers if name in schema.names]
    if not kinds:
        raise InputError(f"no input file has the column {name!r}, which should be kept")
    merged = kinds[0]
    for uri, kind in kinds:
        merged = (uri, _common(name, merged, (uri, kind)))
    for uri, kind in kinds:
        if not _holds_all(merged[1], kind):
            raise _refusal(name, (uri, kind), merged[1])
    return pa.field(name, merged[1])


def _common(name: str, merged: tuple[str, pa.DataType], other: tuple[str, pa.DataType]) -> pa.DataType:
    schemas = [pa.schema([pa.field(name, kind)]) for _, kind in (merged, other)]
    try:
        return pa.unify_schemas(schemas, promote_options="permissive").field(name).type
    except pa.ArrowException as error:
        raise _refusal(name, other, merged[1]) from error


def _refusal(name: str, one: tuple[str, pa.DataType], common: pa.DataType) -> InputError:
    return InputError(f"kept column {name!r} is {one[1]} in {one[0]} and {common} elsewhere or in common, which "
                      "can't hold all such values; convert one of them, or do not keep it")


def _value_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.string() if is_text(kind) else kind


def _holds_all(wide: pa.DataType, narrow: pa.DataType) -> bool:
    """Whether every value of `narrow` is a value of `wide`."""
    if wide.equals(narrow) or pa.types.is_null(narrow):
        return True
    if pa.types.is_list(wide) and pa.types.is_list(narrow):
        return _holds_all(wide.value_type, narrow.value_type)
    if pa.types.is_struct(wide) and pa.types.is_struct(narrow):
        return ([field.name for field in wide] == [field.name for field in narrow]
                and all(_holds_all(a.type, b.type) for a, b in zip(wide, narrow, strict=True)))
    if pa.types.is_decimal(wide) and pa.types.is_decimal(narrow):
        return bool(wide.scale >= narrow.scale and wide.precision - wide.scale >= narrow.precision - narrow.scale)
    if _is_bytes(wide):
        return _is_bytes(narrow) or pa.types.is_string(narrow)
    return _is_number(wide) and _is_number(narrow) and _number_fits(wide, narrow)


def _number_fits(wide: pa.DataType, narrow: pa.DataType) -> bool:
    if pa.types.is_floating(narrow):
        return bool(pa.types.is_floating(wide) and wide.bit_width >= narrow.bit_width)
    signed = pa.types.is_signed_integer(narrow)
    bits = narrow.bit_width - signed
    if pa.types.is_floating(wide):
        return bool(bits <= _MANTISSA_BITS[wide.bit_width])
    wide_signed = pa.types.is_signed_integer(wide)
    return bool(bits <= wide.bit_width - wide_signed and wide_signed >= signed)


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))
