"""The rows that have been admitted and are not answered: their pages, slots and views for the scheduler.

Carries out each kind of decision in the order reserve, commit, advance the status.  Does not decide, sample or answer.
"""

from __future__ import annotations

from collections.abc import Iterable

from batchgen_beam.engine.executor import Executor
from batchgen_beam.engine.kv_pool import KVPool
from batchgen_beam.engine.prefix_sharing import Look, find_prefix, read_prefix
from batchgen_beam.engine.sampler import stream_key
from batchgen_beam.engine.scheduler import RowView
from batchgen_beam.engine.sequence import Sequence, Status, Wish
from batchgen_beam.engine.slots import SlotTable
from batchgen_beam.models.sampling import SamplingLines
from batchgen_beam.settings import PAGE_TOKENS

__all__ = ["LiveRows", "view_of"]


def view_of(row: Sequence, pool: KVPool, *, full: bool = False) -> RowView:
    """The row as the scheduler sees it now."""
    return RowView(seq_id=row.seq_id, status=row.status, tokens=row.context, computed=row.computed,
                   pages=pool.held_pages(row.seq_id), prefix=tuple(page.number for page in pool.shared(row.seq_id)),
                   full=full)


def _age(row: Sequence) -> int:
    return row.seq_id


class LiveRows:
    """Sequences by id, with the owner of pages, the slot arrays and the sampling lines of the device."""

    def __init__(self, pool: KVPool, table: SlotTable, executor: Executor) -> None:
        self.pool = pool
        self.table = table
        self.lines = SamplingLines.allocate(table.slots)
        self.rows: dict[int, Sequence] = {}
        self.slot_of: dict[int, int] = {}
        self.views: dict[int, RowView] = {}
        self._executor = executor

    # Decisions

    def hold(self, row: Sequence) -> None:
        """Move a decoding row's KV to the host tier and free its slot."""
        self._executor.copy(self.pool.hold(row.seq_id), to_host=True)
        self._leave_slot(row)
        row.become(Status.HELD)
        self._look(row)

    def evict(self, row: Sequence) -> None:
        """Drop a row's KV; only what it has said remains."""
        if row.seq_id in self.slot_of:
            self._leave_slot(row)
        self.pool.release(row.seq_id)
        row.become(Status.EVICTED)
        self._look(row)

    def extend(self, rows: list[Sequence]) -> None:
        """The next page for decoding rows whose last one is full."""
        self._grow(rows)
        for row in rows:
            self._decode_on(row)

    def restore(self, rows: list[Sequence]) -> None:
        """Held rows come back to the device and go on; one after the other, each with the page that it lacks."""
        for row in rows:
            self._executor.copy(self.pool.restore(row.seq_id), to_host=False)
            self._grow([row])
            row.become(Status.DECODE)
            self._enter_slot(row)
            self._decode_on(row)

    def admit(self, rows: list[Sequence]) -> None:
        """New and evicted rows get a slot and pages for their whole context, beside the prefix that they share."""
        self._grow(rows)
        for row in rows:
            row.become(Status.PREFILL)
            self.rows[row.seq_id] = row
            self._enter_slot(row)
            self._look(row)

    def _grow(self, rows: Iterable[Sequence]) -> None:
        """Reserve and commit what the rows lack for their context, all or nothing, and clear the new pages."""
        reservation = self.pool.reserve((row.seq_id, row.computed, row.context) for row in rows)
        for group in self.pool.groups:
            self._executor.clear(group, reservation.of_group(group))
        self.pool.commit(reservation)

    # Prefixes

    def read_prefixes(self, rows: Iterable[Sequence]) -> None:
        """Rows that are about to be admitted get the pages that others have computed; nobody takes them now."""
        for row in rows:
            read_prefix(row, self.pool)

    def look(self, queue: Iterable[Sequence]) -> tuple[tuple[RowView, ...], tuple[RowView, ...], frozenset[int]]:
        """The admitted rows and those of the queue as the scheduler sees them, and who waits for another's prefix."""
        if not self.pool.shares:
            return tuple(self.views.values()), tuple(view_of(row, self.pool) for row in queue), frozenset()
        look = Look()
        beginning = sorted((row for row in self.rows.values() if row.status is Status.PREFILL), key=_age)
        for row in beginning:
            if read_prefix(row, self.pool):
                self._place(row)
                self._look(row)
            look.see(row, len(self.pool.shared(row.seq_id)), row.computed)
        for row in sorted((row for row in self.rows.values() if row.status is Status.EVICTED), key=_age):
            self.views[row.seq_id] = self._entering(row, look)
        waiting = tuple(self._entering(row, look) for row in queue)
        return tuple(self.views.values()), waiting, frozenset(look.followers)

    def _entering(self, row: Sequence, look: Look) -> RowView:
        """The row as it would be on the device: with the prefix that is there."""
        prefix = find_prefix(row, self.pool)
        look.see(row, len(prefix), len(prefix) * PAGE_TOKENS)
        return RowView(seq_id=row.seq_id, status=row.status, tokens=row.context, computed=len(prefix) * PAGE_TOKENS,
                       pages=(len(prefix),) * len(self.pool.groups), prefix=tuple(page.number for page in prefix))

    # Events

    def publish(self, row: Sequence) -> None:
        """A prompt chunk was computed: its full pages may be read by others."""
        self.pool.publish(row.seq_id, row.prompt_pages, row.computed)

    def sync(self, row: Sequence) -> None:
        """Bring a row's state up to the present step, at an event or between two."""
        slot = self.slot_of[row.seq_id]
        new, finish = self.table.collect(slot)
        row.absorb(new, finish)
        if row.status is Status.DECODE:
            row.computed_to(row.context - 1)

    def visit(self, row: Sequence) -> Wish:
        """The row has met an event: advance its coroutine and prepare what it wants."""
        self.sync(row)
        wish = row.advance()
        if wish is Wish.DECODE:
            self._prepare_decode(row)
        elif wish is Wish.PREFILL:
            self.pool.trim(row.seq_id, row.computed)
            self._place(row)
            self._look(row)
        return wish

    def _prepare_decode(self, row: Sequence) -> None:
        """Run on, or wait for the scheduler to find the next page."""
        if row.status is Status.PREFILL:
            row.become(Status.DECODE)
        self.pool.trim(row.seq_id, row.computed)
        capacity = self.pool.capacity(row.seq_id)
        if capacity is None or row.context <= capacity:
            self._decode_on(row)
        else:
            self.table.pause(self.slot_of[row.seq_id])
            self._look(row, full=True)

    def forget(self, row: Sequence) -> None:
        """The row is answered or gone: free its pages and its slot."""
        slot = self.slot_of.pop(row.seq_id, None)
        if slot is not None:
            self.table.collect(slot)
            self.table.leave(slot)
        self.pool.release(row.seq_id)
        del self.rows[row.seq_id], self.views[row.seq_id]

    # Slots

    def _enter_slot(self, row: Sequence) -> None:
        slot = self.table.enter(row)
        self.slot_of[row.seq_id] = slot
        self.lines.put(slot, row.params, stream_key(row.params.seed, row.key.text, row.choice_index))
        self._place(row)

    def _leave_slot(self, row: Sequence) -> None:
        self.sync(row)
        self.table.leave(self.slot_of.pop(row.seq_id))

    def _place(self, row: Sequence) -> None:
        for group in self.pool.groups:
            first, pages = self.pool.table(row.seq_id, group)
            self.table.place(self.slot_of[row.seq_id], group, first, pages)

    def _decode_on(self, row: Sequence) -> None:
        """The row's pages are there: it runs in every step until its next event."""
        self._place(row)
        self.table.await_event(self.slot_of[row.seq_id], self.pool.capacity(row.seq_id))
        self._look(row)

    def _look(self, row: Sequence, *, full: bool = False) -> None:
        self.views[row.seq_id] = view_of(row, self.pool, full=full)

    def check_integrity(self) -> None:
        """Pages balance; slots, rows and views agree."""
        self.pool.check_integrity()
        assert self.rows.keys() == self.views.keys()
        assert self.slot_of.keys() <= self.rows.keys()
        assert self.table.free + len(self.slot_of) == self.table.slots
        for seq_id, slot in self.slot_of.items():
            assert self.table.sequences[slot] is self.rows[seq_id]
            assert self.rows[seq_id].status in (Status.PREFILL, Status.DECODE)
        assert set(self.table.tables) == set(self.pool.groups)
