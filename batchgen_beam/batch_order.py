"""The order of rows in a packed batch, told by their stable ids.

Owns the spans from which a packed prefill is built, and the proof that an order is the expected one.  Pure functions
over plain data: knows neither tensors nor files.

`local_indices` are a worker's own dense indices of the rows in a batch, in packed order; `uuid` is a row's stable id
on every worker; `global_seq_id` is the index that the KV pages of the row are kept under.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "PrefillSequenceSpan",
    "batch_matches_expected_uuid_order",
    "build_prefill_sequence_spans",
    "local_indices_to_uuid_order",
    "prefill_sequence_spans_to_cu_seqlens",
    "prefill_sequence_spans_to_global_seq_ids",
]


@dataclass(frozen=True)
class PrefillSequenceSpan:
    """One row of a packed prefill: its tokens are `start : end` of the packed tokens, `row_index` its place."""

    row_index: int
    local_idx: int
    uuid: str
    global_seq_id: int
    seq_len: int
    start: int
    end: int


def local_indices_to_uuid_order(local_indices: Sequence[int], local_to_uuid_map: Mapping[int, str]) -> list[str | None]:
    """The id of each index, in the given order; None for an index without id."""
    return [local_to_uuid_map.get(index) for index in local_indices]


def batch_matches_expected_uuid_order(local_indices: Sequence[int], expected_uuids: Sequence[str],
                                      uuid_to_local_map: Mapping[str, int]) -> bool:
    """Whether the batch holds exactly the expected rows in exactly the expected order; False for an unmapped id."""
    return list(local_indices) == [uuid_to_local_map.get(uuid) for uuid in expected_uuids]


def build_prefill_sequence_spans(local_indices: Sequence[int], seq_lengths: Sequence[int],
                                 local_to_uuid_map: Mapping[int, str],
                                 local_to_global_seq_id_map: Mapping[int, int]) -> list[PrefillSequenceSpan]:
    """The spans of rows packed one after another, lengths in tokens.

    `ValueError` when the two sequences differ in length; `KeyError` names the first row without id or global id.
    """
    if len(local_indices) != len(seq_lengths):
        raise ValueError(f"local_indices and seq_lengths must have the same length, got {len(local_indices)} and "
                         f"{len(seq_lengths)}")
    spans: list[PrefillSequenceSpan] = []
    start = 0
    for row_index, (local_idx, length) in enumerate(zip(local_indices, seq_lengths, strict=True)):
        uuid, global_seq_id = _identify(local_idx, local_to_uuid_map, local_to_global_seq_id_map)
        end = start + int(length)
        spans.append(PrefillSequenceSpan(row_index=row_index, local_idx=local_idx, uuid=uuid,
                                         global_seq_id=global_seq_id, seq_len=int(length), start=start, end=end))
        start = end
    return spans


def _identify(local_idx: int, uuids: Mapping[int, str], global_ids: Mapping[int, int]) -> tuple[str, int]:
    uuid = uuids.get(local_idx)
    if uuid is None:
        raise KeyError(f"no uuid for local_idx={local_idx}")
    global_seq_id = global_ids.get(local_idx)
    if global_seq_id is None:
        raise KeyError(f"no global sequence id for local_idx={local_idx}, uuid={uuid}")
    return uuid, global_seq_id


def prefill_sequence_spans_to_cu_seqlens(spans: Sequence[PrefillSequenceSpan]) -> list[int]:
    """Cumulative lengths, 0 first: token offsets of the rows."""
    return [0, *(span.end for span in spans)]


def prefill_sequence_spans_to_global_seq_ids(spans: Sequence[PrefillSequenceSpan]) -> list[int]:
    """The global ids in packed order."""
    return [span.global_seq_id for span in spans]
