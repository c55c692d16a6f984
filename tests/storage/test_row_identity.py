"""Ids and digests."""

from __future__ import annotations

import itertools
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen_beam.storage.row_identity import (
    is_unicode,
    positional_id,
    row_digest,
    row_id,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4), max_leaves=8)


def test_positional_ids_are_uuids_of_the_whole_position() -> None:
    """The id of a row without id is a UUIDv5 that changes with the file, the row group and the row."""
    places = itertools.product(("file:///a/x", "file:///b/x"), (0, 1), (0, 1))
    ids = {positional_id(uri, group, row) for uri, group, row in places}
    assert len(ids) == 8
    assert {uuid.UUID(text).version for text in ids} == {5}
    assert positional_id("file:///a/x", 0, 0) == str(
        uuid.uuid5(uuid.NAMESPACE_URL, "file:///a/x#row_group=0,row=0")), "durable: never changes"


@pytest.mark.parametrize(("value", "text"), [
    ("x", "x"), (17, "17"), (0, "0"), (-3, "-3"), (2**80, str(2**80)), (" ", " "),
    (uuid.UUID(int=5), "00000000-0000-0000-0000-000000000005"),
])
def test_ids_are_text(value: object, text: str) -> None:
    """Text stays as it is, integers (0 too) become decimal text, UUIDs their usual form."""
    assert row_id(value, "uuid") == text


@pytest.mark.parametrize(("value", "reason"), [
    (None, "null"), ("", "empty"), (1.0, "float"), (True, "bool"), ([1], "list"), ("\ud800", "Unicode"),
])
def test_what_is_no_id_says_why(value: object, reason: str) -> None:
    """A value that can't identify a row is refused with the column's name and the reason."""
    with pytest.raises(ValueError, match=rf"'my_id'.*{reason}"):
        row_id(value, "my_id")


def test_digest_is_durable() -> None:
    """The digest of a given row never changes: journals and published units are found by it."""
    values = {"prompt": "Grüße", "temperature": 1, "messages": [{"role": "user", "content": "x"}], "seed": None}
    assert row_digest(values) == "8d212cd748262e48cac384e6f5537ed1f08d76db57cf3b053efacff4c295ca68"


@given(VALUES, VALUES)
def test_digests_differ_where_values_differ(left: Any, right: Any) -> None:
    """Two values have one digest only if they are the same value of the same type."""
    same = repr(_sorted(left)) == repr(_sorted(right))
    assert (row_digest({"prompt": left}) == row_digest({"prompt": right})) == same


def _sorted(value: Any) -> Any:
    """The value with its dictionaries as sorted pairs."""
    if isinstance(value, dict):
        return "dict", [(key, _sorted(value[key])) for key in sorted(value)]
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def test_number_types_count_except_in_float_columns() -> None:
    """1 and 1.0 are one temperature, but not one token limit; True is never 1."""
    assert row_digest({"temperature": 1}) == row_digest({"temperature": 1.0})
    assert row_digest({"top_p": 0}) == row_digest({"top_p": 0.0})
    assert row_digest({"max_tokens": 1}) != row_digest({"max_tokens": 1.0})
    assert row_digest({"temperature": True}) != row_digest({"temperature": 1})
    assert row_digest({"temperature": 10**400}) != row_digest({"temperature": 1})


def test_key_order_does_not_count() -> None:
    """Columns and message fields in another order are the same question."""
    one = {"prompt": "p", "messages": [{"role": "user", "content": "c"}]}
    other = {"messages": [{"content": "c", "role": "user"}], "prompt": "p"}
    assert row_digest(one) == row_digest(other)


def test_text_is_not_confused_with_structure() -> None:
    """Lengths are part of the encoding: joined or split texts differ, and so do a list and its text."""
    digests = {row_digest({"prompt": value}) for value in (["ab", "c"], ["a", "bc"], ["abc"], "abc", b"abc", "['abc']")}
    assert len(digests) == 6
    assert row_digest({"prompt": "x", "messages": "y"}) != row_digest({"prompt": "y", "messages": "x"})


def test_lone_surrogates_have_a_digest() -> None:
    """Text that is not Unicode still has a digest, so that its row can fail by name."""
    assert not is_unicode("a\ud800")
    assert row_digest({"prompt": "a\ud800"}) != row_digest({"prompt": "a"})
