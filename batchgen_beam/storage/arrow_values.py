"""Arrow values as Python values and as storable text, whatever a file holds: one cell never stops a reader.

Owns what becomes of bytes that are no UTF-8 and of values that Python can't hold.  Does not know files or columns'
meaning.
"""

from __future__ import annotations

import pyarrow as pa

__all__ = ["has_text_dictionary", "is_text", "python_values", "storable_column", "storable_text"]

_UNFIT = (ValueError, OverflowError, LookupError, pa.ArrowException)
"""What the conversion of a cell raises: not UTF-8, out of Python's range, or in a time zone that does not exist."""


def is_text(kind: pa.DataType) -> bool:
    """Whether this is one of Arrow's types of text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def has_text_dictionary(kind: pa.DataType) -> bool:
    """Whether values of the type have a dictionary of texts, at any depth."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return any(has_text_dictionary(kind.field(i).type) for i in range(kind.num_fields))


def python_values(column: pa.Array) -> list[object]:
    """Python values of a column.

    Arrow can't tell an absent struct field from a null one: null fields are left out, as JSON would leave them.
    Bytes in a text column that are not UTF-8 become lone surrogates, which the row's check then refuses by name; a
    value that Python can't hold becomes bytes that describe it, which no column may hold.
    """
    try:
        values: list[object] = column.to_pylist()
    except _UNFIT:
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
    if is_text(scalar.type):
        return scalar.as_buffer().to_pybytes().decode("utf-8", "surrogateescape")
    if isinstance(scalar, pa.DictionaryScalar):
        return _lenient(scalar.value)
    if isinstance(scalar, pa.MapScalar):
        return [tuple(_lenient(part) for part in entry.values()) for entry in scalar.values]
    if isinstance(scalar, pa.ListScalar):
        return [_lenient(item) for item in scalar.values]
    if isinstance(scalar, pa.StructScalar):
        return {name: _lenient(item) for name, item in scalar.items()}
    try:
        return scalar.as_py()
    except _UNFIT:
        return f"{scalar.type} {getattr(scalar, 'value', '')}".encode("utf-8", "surrogateescape")


def storable_text(text: str) -> str:
    """The text with every lone surrogate written as its escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def storable_column(column: pa.Array) -> pa.Array:
    """The column in its own type; bytes in its texts that are not UTF-8 are replaced by escapes such as `\\udcff`."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return _escaped(column.take(pa.array(range(len(column)), pa.int64())))  # without the offset of a slice
    return column


def _escaped(column: pa.Array) -> pa.Array:
    kind = column.type
    if is_text(kind):
        texts = (_lenient(scalar) for scalar in column)
        return pa.array([storable_text(text) if isinstance(text, str) else None for text in texts], kind)
    if pa.types.is_struct(kind):
        parts = [_escaped(column.field(i)) for i in range(kind.num_fields)]
        return pa.StructArray.from_arrays(parts, fields=list(kind), mask=column.is_null())
    if pa.types.is_map(kind):
        return pa.MapArray.from_arrays(column.offsets, _escaped(column.keys), _escaped(column.items), kind,
                                       mask=column.is_null())
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return type(column).from_arrays(column.offsets, _escaped(column.values), type=kind, mask=column.is_null())
    return column
