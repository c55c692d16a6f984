"""What a list of turns is.

Owns reading a `messages` value (structs, dicts or JSON text) into plain turns that a template may see, and naming the
place of what is wrong.  Does not know templates or tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from batchgen_beam.errors import ErrorCode, RowError
from batchgen_beam.text.tokenizer import check_text

__all__ = ["read_turns"]

Plain = str | int | float | bool | None | list["Plain"] | dict[str, "Plain"]


def read_turns(value: object) -> list[dict[str, Plain]]:
    """The turns of a conversation: each has a `role` and a `content`, both texts; other fields go on where not null.

    Raises:
        RowError: INVALID_ROW naming the place, or INVALID_TEXT where a text holds a lone surrogate.
    """
    if isinstance(value, str):
        value = _parse(value)
    if not isinstance(value, list | tuple):
        raise _invalid(f"messages should be a list of turns with role and content, got {_kind(value)}")
    if not value:
        raise _invalid("messages holds no turn")
    try:
        return [_turn(f"messages[{i}]", item) for i, item in enumerate(value)]
    except RecursionError as error:
        raise _invalid("messages is nested too deeply") from error


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"messages is text, but no JSON: {error}") from error


def _turn(place: str, item: object) -> dict[str, Plain]:
    if not isinstance(item, Mapping):
        raise _invalid(f"{place} should be a turn with role and content, got {_kind(item)}")
    for name in ("role", "content"):
        if not isinstance(item.get(name), str):
            raise _invalid(f"{place}.{name} should be text, got {_kind(item.get(name))}")
    if not item["role"]:
        raise _invalid(f"{place}.role is empty")
    return {str(name): _plain(f"{place}.{name}", field) for name, field in item.items() if field is not None}


def _plain(place: str, value: object) -> Plain:
    """The value rebuilt of JSON's types, so that a template meets no object with methods of its own."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        check_text(value, place)
        return value
    if isinstance(value, list | tuple):
        return [_plain(f"{place}[{i}]", item) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        fields = {str(name): item for name, item in value.items()}
        return {name: _plain(f"{place}.{name}", item) for name, item in fields.items() if item is not None}
    raise _invalid(f"{place} holds {_kind(value)}, which is neither text, number, list nor struct")


def _kind(value: object) -> str:
    return "null" if value is None else type(value).__name__


def _invalid(message: str) -> RowError:
    return RowError(ErrorCode.INVALID_ROW, message)
