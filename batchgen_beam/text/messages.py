"""What a list of turns is.

Owns reading a `messages` value (structs, dicts or JSON text) into plain turns that a template may see, and the words
for what is wrong in a row.  Does not know templates or tokenizers.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping

from batchgen_beam.errors import ErrorCode, RowError
from batchgen_beam.text.tokenizer import check_text

__all__ = ["invalid_row", "kind_of", "read_turns"]

Plain = str | int | float | bool | None | list["Plain"] | dict[str, "Plain"]


def read_turns(value: object) -> list[dict[str, Plain]]:
    """The turns of a conversation: each has a `role` and a `content`, both texts; other fields go on where not null.

    A content that is a list of text parts, `{"type": "text", "text": ...}`, is their texts, one a line.

    Raises:
        RowError: INVALID_ROW naming the place, or INVALID_TEXT where a text holds a lone surrogate.
    """
    if isinstance(value, str):
        value = _parse(value)
    if not isinstance(value, list | tuple):
        raise invalid_row(f"messages should be a list of turns with role and content, got {kind_of(value)}")
    if not value:
        raise invalid_row("messages holds no turn")
    try:
        return [_turn(f"messages[{i}]", item) for i, item in enumerate(value)]
    except RecursionError as error:
        raise invalid_row("messages is nested too deeply") from error


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid_row(f"messages is text, but no JSON: {error}") from error


def _turn(place: str, item: object) -> dict[str, Plain]:
    if not isinstance(item, Mapping):
        raise invalid_row(f"{place} should be a turn with role and content, got {kind_of(item)}")
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str):
        raise invalid_row(f"{place}.role should be text, got {kind_of(role)}")
    if not role:
        raise invalid_row(f"{place}.role is empty")
    if not isinstance(content, str):
        content = _joined(f"{place}.content", content)
    fields = {**item, "content": content}
    return {str(name): _plain(f"{place}.{name}", field) for name, field in fields.items() if field is not None}


def _joined(place: str, parts: object) -> str:
    if not isinstance(parts, list | tuple):
        raise invalid_row(f"{place} should be text or a list of text parts, got {kind_of(parts)}")
    if not parts:
        raise invalid_row(f"{place} holds no part")
    return "\n".join(_text_of(f"{place}[{i}]", part) for i, part in enumerate(parts))


def _text_of(place: str, part: object) -> str:
    if not isinstance(part, Mapping):
        raise invalid_row(f"{place} should be a part with type and text, got {kind_of(part)}")
    if part.get("type") != "text":
        raise invalid_row(f"{place} is a part of type {reprlib.repr(part.get('type'))}; only 'text' can be answered")
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid_row(f"{place}.text should be text, got {kind_of(text)}")
    return text


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
    raise invalid_row(f"{place} holds {kind_of(value)}, which is neither text, number, list nor struct")


def kind_of(value: object) -> str:
    """What a value is, in words for a message about its row."""
    return "null" if value is None else type(value).__name__


def invalid_row(message: str) -> RowError:
    """The error to raise about a row that asks nothing that could be answered."""
    return RowError(ErrorCode.INVALID_ROW, message)
