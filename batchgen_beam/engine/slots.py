"""The rows that are on the device, as arrays with one line per slot.

Owns what changes at every step (last token, context, tokens sampled since the last event), so that a decode step costs
no Python per row, and says which rows have reached an event.  Does not know pages' owners, models or plans.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from batchgen_beam.engine.sequence import NewTokens, Sequence
from batchgen_beam.models.caches import GroupKey
from batchgen_beam.records import MAX_TOP_LOGPROBS, FinishReason, TokenLogprobs, float_array, token_array
from batchgen_beam.settings import PAGE_TOKENS

__all__ = ["Ints", "SlotTable"]

Ints = NDArray[np.int64]


class SlotTable:
    """Persistent arrays over `slots` rows.  A slot is *running* while its row decodes one token per step."""

    def __init__(self, slots: int, groups: tuple[GroupKey, ...], eos_ids: frozenset[int], vocabulary: int) -> None:
        self.slots = slots
        self.sequences: list[Sequence | None] = [None] * slots
        self.last_token = np.zeros(slots, np.int64)
        self.context = np.zeros(slots, np.int64)
        self.running = np.zeros(slots, np.bool_)
        self.tables = {group: np.zeros((slots, 1), np.int64) for group in groups}
        self._limit = np.zeros(slots, np.int64)
        self._visit_at = np.zeros(slots, np.int64)
        self._new = np.zeros(slots, np.int64)
        self._ids = np.zeros((slots, PAGE_TOKENS), np.int32)
        self._chosen = np.zeros((slots, PAGE_TOKENS), np.float32)
        self._top_ids = np.zeros((slots, PAGE_TOKENS, MAX_TOP_LOGPROBS), np.int32)
        self._top = np.zeros((slots, PAGE_TOKENS, MAX_TOP_LOGPROBS), np.float32)
        self._ends = np.zeros(vocabulary, np.bool_)
        self._ends[[token for token in eos_ids if token < vocabulary]] = True
        self._free = list(range(slots - 1, -1, -1))

    @property
    def free(self) -> int:
        """Slots that are empty."""
        return len(self._free)

    def enter(self, sequence: Sequence) -> int:
        """Give a sequence a slot; its pages are set by `place`."""
        slot = self._free.pop()
        self.sequences[slot] = sequence
        self._limit[slot] = sequence.limit
        self.context[slot] = sequence.context
        self._new[slot] = 0
        self.running[slot] = False
        return slot

    def pause(self, slot: int) -> None:
        """The row does not run until `await_event`: it needs a page, or its prefill is under way."""
        self.running[slot] = False

    def leave(self, slot: int) -> None:
        """Empty a slot, whose new tokens must have been collected."""
        assert self._new[slot] == 0, slot
        self.sequences[slot] = None
        self.running[slot] = False
        self._free.append(slot)

    def place(self, slot: int, group: GroupKey, first: int, pages: list[int]) -> None:
        """Write a row's page ids: `pages[i]` at column `first + i`, zero pages elsewhere."""
        table = self.tables[group]
        if first + len(pages) > table.shape[1]:
            table = np.pad(table, ((0, 0), (0, first + len(pages) - table.shape[1])))
            self.tables[group] = table
        table[slot] = 0
        table[slot, first : first + len(pages)] = pages

    def await_event(self, slot: int, capacity: int | None) -> None:
        """Decode from the sequence's state until it ends or outgrows `capacity` positions (None: unbounded)."""
        sequence = self._sequence(slot)
        self.context[slot] = sequence.context
        self.last_token[slot] = sequence.generated[-1]
        outgrown = sequence.limit if capacity is None else capacity + 1
        self._visit_at[slot] = min(sequence.limit, outgrown, sequence.context + PAGE_TOKENS)
        self.running[slot] = True

    def record(self, slots: Ints, ids: Ints, chosen: NDArray[np.float32], top_ids: Ints,
               top: NDArray[np.float32]) -> None:
        """One sampled token for each of `slots`; `top_ids` and `top` are [len(slots), width]."""
        at = self._new[slots]
        self._ids[slots, at] = ids
        self._chosen[slots, at] = chosen
        if top.shape[1]:
            self._top_ids[slots, at, : top.shape[1]] = top_ids
            self._top[slots, at, : top.shape[1]] = top
        self._new[slots] = at + 1
        self.context[slots] += 1
        self.last_token[slots] = ids

    def due(self, slots: Ints) -> Ints:
        """Those of `slots` that have reached an event: they ended, or their page is full."""
        return slots[(self.context[slots] >= self._visit_at[slots]) | self._ends[self.last_token[slots]]]

    def collect(self, slot: int) -> tuple[NewTokens, FinishReason | None]:
        """Hand over what was sampled since the last event, and whether the row has ended; stop beats length."""
        number = int(self._new[slot])
        width = self._sequence(slot).params.logprobs
        self._new[slot] = 0
        logprobs = TokenLogprobs(
            width=width,
            chosen=float_array(self._chosen[slot, :number]),
            top_ids=token_array(self._top_ids[slot, :number, :width].ravel()),
            top=float_array(self._top[slot, :number, :width].ravel()),
        )
        return NewTokens(token_array(self._ids[slot, :number]), logprobs), self._ended(slot, number)

    def _ended(self, slot: int, number: int) -> FinishReason | None:
        if number and self._ends[self.last_token[slot]]:
            return FinishReason.STOP
        if number and self.context[slot] >= self._limit[slot]:
            return FinishReason.LENGTH
        return None

    def _sequence(self, slot: int) -> Sequence:
        sequence = self.sequences[slot]
        assert sequence is not None, slot
        return sequence
