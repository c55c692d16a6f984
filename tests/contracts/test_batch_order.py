"""Laws of `batchgen_beam/batch_order.py`."""

from __future__ import annotations

import dataclasses

import pytest

from batchgen_beam.batch_order import (
    PrefillSequenceSpan,
    batch_matches_expected_uuid_order,
    build_prefill_sequence_spans,
    local_indices_to_uuid_order,
    prefill_sequence_spans_to_cu_seqlens,
    prefill_sequence_spans_to_global_seq_ids,
)

UUIDS = {4: "seq-a", 1: "seq-b"}
GLOBAL_IDS = {4: 20, 1: 3}
SPANS = [
    PrefillSequenceSpan(row_index=0, local_idx=4, uuid="seq-a", global_seq_id=20, seq_len=1138, start=0, end=1138),
    PrefillSequenceSpan(row_index=1, local_idx=1, uuid="seq-b", global_seq_id=3, seq_len=1439, start=1138, end=2577),
]


def test_span_fields() -> None:
    """A span is frozen and has these fields in this order."""
    names = [field.name for field in dataclasses.fields(PrefillSequenceSpan)]
    assert names == ["row_index", "local_idx", "uuid", "global_seq_id", "seq_len", "start", "end"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        SPANS[0].start = 1  # type: ignore[misc]


@pytest.mark.parametrize(("indices", "expected"), [
    ([1, 4, 9], ["seq-b", "seq-a", None]),
    ((4, 4, 1), ["seq-a", "seq-a", "seq-b"]),
    ([7], [None]),
    ([], []),
])
def test_uuid_order(indices: list[int], expected: list[str | None]) -> None:
    """One entry per index, order and duplicates kept, None for an unmapped index, never an error."""
    assert local_indices_to_uuid_order(indices, UUIDS) == expected


@pytest.mark.parametrize(("indices", "expected", "matches"), [
    ([4, 1], ["seq-a", "seq-b"], True),
    ((4, 1), ["seq-a", "seq-b"], True),
    ([4, 1], ("seq-a", "seq-b"), True),
    ([1, 4], ["seq-a", "seq-b"], False),
    ([4], ["seq-a", "seq-b"], False),
    ([4, 1, 0], ["seq-a", "seq-b"], False),
    ([4, 9], ["seq-a", "seq-x"], False),
    ([0], ["seq-zero"], True),
    ([], [], True),
    ((), [], True),
])
def test_expected_order(indices: list[int], expected: list[str], matches: bool) -> None:
    """False for other lengths, an unmapped id, another order; index 0 is valid; lists and tuples alike."""
    assert batch_matches_expected_uuid_order(indices, expected, {"seq-a": 4, "seq-b": 1, "seq-zero": 0}) is matches


def test_spans() -> None:
    """Rows follow one another: `start` of the first is 0, each `end` is the next `start`."""
    assert build_prefill_sequence_spans([4, 1], [1138, 1439], UUIDS, GLOBAL_IDS) == SPANS
    assert build_prefill_sequence_spans((4, 1), (1138, 1439), UUIDS, GLOBAL_IDS) == SPANS
    assert build_prefill_sequence_spans([], [], UUIDS, GLOBAL_IDS) == []


def test_spans_take_zero_lengths_duplicates_and_zero_ids() -> None:
    """A zero length gives `start == end`; duplicates, global id 0 and more map entries are fine; lengths are `int`."""
    spans = build_prefill_sequence_spans([0, 4, 0], [0, 2.0, 3], {**UUIDS, 0: "seq-z"},  # type: ignore[list-item]
                                         {**GLOBAL_IDS, 0: 0, 77: 8})
    assert [(s.uuid, s.global_seq_id, s.seq_len, s.start, s.end) for s in spans] == [
        ("seq-z", 0, 0, 0, 0), ("seq-a", 20, 2, 0, 2), ("seq-z", 0, 3, 2, 5)]
    assert all(type(span.seq_len) is int for span in spans)


def test_spans_refuse_other_lengths_before_any_look_up() -> None:
    """The `ValueError` says `same length` and both lengths, also where an id would be missing."""
    with pytest.raises(ValueError, match=r"same length.*3.*1"):
        build_prefill_sequence_spans([9, 9, 9], [5], {}, {})


@pytest.mark.parametrize(("indices", "uuids", "ids", "words"), [
    ([4, 9], UUIDS, {**GLOBAL_IDS, 9: 1}, ["local_idx=9"]),
    ([4, 1], UUIDS, {4: 20}, ["local_idx=1", "seq-b"]),
    ([9, 8], UUIDS, {}, ["local_idx=9"]),
])
def test_spans_name_the_first_row_without_id(indices: list[int], uuids: dict[int, str], ids: dict[int, int],
                                             words: list[str]) -> None:
    """A `KeyError` names `local_idx` and, when only the global id is missing, the uuid; the uuid is checked first."""
    with pytest.raises(KeyError) as caught:
        build_prefill_sequence_spans(indices, [1] * len(indices), uuids, ids)
    assert all(word in str(caught.value) for word in words)
    if len(words) == 1:
        assert "uuid" in str(caught.value)
        assert "global" not in str(caught.value)


def test_offsets_and_global_ids() -> None:
    """Cumulative lengths begin with 0; ids keep the packed order."""
    assert prefill_sequence_spans_to_cu_seqlens(SPANS) == [0, 1138, 2577]
    assert prefill_sequence_spans_to_cu_seqlens([]) == [0]
    assert prefill_sequence_spans_to_global_seq_ids(SPANS) == [20, 3]
    assert prefill_sequence_spans_to_global_seq_ids([]) == []
