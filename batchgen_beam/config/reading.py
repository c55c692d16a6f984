"""Typed reading of a decoded config.json: a wrong type names the key and the file.

Owns how a dataclass field finds its JSON value (aliases, own readers, least values, null as absent).  Does not know
any model family, and opens no file.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from batchgen_beam.errors import CheckpointError

__all__ = ["FieldReader", "JsonObject", "json_field", "read_fields"]


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A decoded JSON object; `where` names its file, and its place in it if it is nested."""

    values: Mapping[str, object]
    where: str

    def error(self, message: str) -> CheckpointError:
        """The error to raise about this object."""
        return CheckpointError(f"{self.where}: {message}")

    def child(self, key: str) -> JsonObject | None:
        """The object under `key`, None when absent or null; anything else there is refused."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(f"{key} must be an object, got {value!r}")
        return JsonObject(value, f"{self.where}: {key}")

    def read(self, key: str, annotation: Any, least: float | None = None) -> Any:
        """The value under `key` as `annotation` (int, float, bool, str, tuple of one); None if null or absent."""
        value = self.values.get(key)
        if value is None:
            return None
        try:
            found = _convert(value, annotation)
        except TypeError as error:
            raise self.error(f"{key} must be {error}, got {value!r}") from None
        if least is not None and isinstance(found, int | float) and not isinstance(found, bool) and found < least:
            raise self.error(f"{key} must be at least {least}, got {value!r}")
        return found


FieldReader = Callable[[JsonObject, Any], Any]
"""Reads a field from the whole object: `(source, default) -> value`."""


def json_field(default: Any, *keys: str, least: float | None = None, reader: FieldReader | None = None) -> Any:
    """A dataclass field with other JSON `keys` than its name, a least value, or a reader of its own."""
    return field(default=default, metadata={"keys": keys, "least": least, "reader": reader})


def read_fields(cls: type, source: JsonObject) -> dict[str, Any]:
    """Keyword arguments for the dataclass `cls`: what the file says; absent keys are left to the defaults.

    null is None for a field that takes None, and as good as absent for any other.  Integers that don't take None are
    counts or sizes, at least 1 unless the field says otherwise.
    """
    hints = typing.get_type_hints(cls)
    found = {}
    for entry in fields(cls):
        reader: FieldReader | None = entry.metadata.get("reader")
        keys = entry.metadata.get("keys") or (entry.name,)
        if reader is not None:
            value = reader(source, entry.default)
        else:
            value = _read_alias(source, keys, hints[entry.name], entry.metadata.get("least"))
        takes_none = isinstance(hints[entry.name], types.UnionType) and reader is None
        if value is not None or (takes_none and any(key in source.values for key in keys)):
            found[entry.name] = value
    return found


def _read_alias(source: JsonObject, keys: tuple[str, ...], annotation: Any, least: float | None) -> Any:
    if annotation is int and least is None:
        least = 1
    found = {key: source.read(key, annotation, least) for key in keys if source.values.get(key) is not None}
    if len(set(found.values())) > 1:
        raise source.error("these keys mean the same and differ: " + ", ".join(f"{k}={v!r}" for k, v in found.items()))
    return next(iter(found.values()), None)


_WORDS = {int: "an integer", float: "a finite number", bool: "true or false", str: "text"}


def _convert(value: object, annotation: Any) -> Any:
    """`value` as `annotation`; a TypeError says what was wanted."""
    if isinstance(annotation, types.UnionType):
        (annotation,) = (kind for kind in typing.get_args(annotation) if kind is not types.NoneType)
    if typing.get_origin(annotation) is tuple:
        return _convert_list(value, typing.get_args(annotation)[0])
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is float and is_number and math.isfinite(typing.cast(float, value)):
        return float(typing.cast(float, value))
    if annotation is float or type(value) is not annotation:
        raise TypeError(_WORDS[annotation])
    return value


def _convert_list(value: object, item: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise TypeError(f"a list, each item {_WORDS[item]}")
    try:
        return tuple(_convert(entry, item) for entry in value)
    except TypeError as error:
        raise TypeError(f"a list, each item {error}") from None
