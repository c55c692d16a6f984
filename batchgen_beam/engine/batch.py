"""From decisions to a packed batch: decode rows first, one token each, then prompt chunks, row by row.

Plain arrays; the executor makes tensors of them.  Decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from batchgen_beam.batch_order import (
    build_prefill_sequence_spans,
    prefill_sequence_spans_to_cu_seqlens,
    prefill_sequence_spans_to_global_seq_ids,
)
from batchgen_beam.engine.scheduler import PrefillChunk
from batchgen_beam.engine.sequence import Sequence as RowSequence
from batchgen_beam.engine.slots import Ints, SlotTable
from batchgen_beam.models.caches import CacheKind, GroupKey

__all__ = ["PackedBatch", "pack"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Arrays of one forward pass, named as in `BatchView`.

    `slots_R` are the rows' slots; `sampled_R` indexes the rows that get a token, in the order of `wanted_W`.
    """

    token_ids_T: Ints
    positions_T: Ints
    row_T: Ints
    offsets_R1: Ints
    wanted_W: Ints
    slots_R: Ints
    sampled_R: Ints
    page_tables: Mapping[GroupKey, Ints]
    state_slots_R: Ints


def pack(table: SlotTable, slot_of: Mapping[int, int], chunks: Sequence[PrefillChunk]) -> PackedBatch:
    """All running rows with their last token, and the chunks with their context tokens."""
    decode = np.flatnonzero(table.running)
    chunk_slots, chunk_offsets, chunk_tokens, chunk_positions, complete = _pack_chunks(table, slot_of, chunks)
    slots = np.concatenate([decode, chunk_slots])
    offsets = np.concatenate([np.arange(len(decode)), len(decode) + chunk_offsets])
    sampled = np.concatenate([np.arange(len(decode)), len(decode) + np.flatnonzero(complete)]).astype(np.int64)
    tables, states = _addresses(table, slots)
    return PackedBatch(
        token_ids_T=np.concatenate([table.last_token[decode], chunk_tokens]),
        positions_T=np.concatenate([table.context[decode] - 1, chunk_positions]),
        row_T=np.repeat(np.arange(len(slots)), np.diff(offsets)),
        offsets_R1=offsets,
        wanted_W=offsets[sampled + 1] - 1,
        slots_R=slots,
        sampled_R=sampled,
        page_tables=tables,
        state_slots_R=states,
    )


def _pack_chunks(table: SlotTable, slot_of: Mapping[int, int],
                 chunks: Sequence[PrefillChunk]) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Slots, cumulative lengths, tokens, positions, and whether each chunk completes its row's context."""
    slots = [slot_of[chunk.seq_id] for chunk in chunks]
    rows: dict[int, RowSequence] = {slot: row for slot in slots if (row := table.sequences[slot]) is not None}
    spans = build_prefill_sequence_spans(
        slots, [chunk.count for chunk in chunks],
        {slot: row.key.text for slot, row in rows.items()}, {slot: row.seq_id for slot, row in rows.items()})
    assert prefill_sequence_spans_to_global_seq_ids(spans) == [chunk.seq_id for chunk in chunks]
    offsets = np.array(prefill_sequence_spans_to_cu_seqlens(spans), np.int64)
    tokens, positions = np.empty(offsets[-1], np.int64), np.empty(offsets[-1], np.int64)
    for span, chunk in zip(spans, chunks, strict=True):
        tokens[span.start : span.end] = rows[span.local_idx].tokens(chunk.start, chunk.count)
        positions[span.start : span.end] = np.arange(chunk.start, chunk.start + chunk.count)
    complete = [chunk.start + chunk.count == rows[span.local_idx].context
                for span, chunk in zip(spans, chunks, strict=True)]
    return np.array(slots, np.int64), offsets, tokens, positions, np.array(complete, np.int64)


def _addresses(table: SlotTable, slots: Ints) -> tuple[dict[GroupKey, Ints], Ints]:
    """Page tables of the rows, cut to the pages that any of them has, and their state slots."""
    tables: dict[GroupKey, Ints] = {}
    states = np.zeros(0, np.int64)
    for group, pages in table.tables.items():
        rows = pages[slots]
        if group.kind is CacheKind.STATE:
            states = rows[:, 0]
            continue
        used = np.flatnonzero(rows.any(axis=0))
        tables[group] = np.ascontiguousarray(rows[:, : int(used[-1]) + 1 if len(used) else 1])
    return tables, states
