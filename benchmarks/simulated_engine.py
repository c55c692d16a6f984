"""An engine on a virtual clock: the real scheduler over rows whose lengths are known, without tensors or tokens.

Owns the rules by which a row's numbers (context, computed, pages) change between two decisions, as `Engine` and
`LiveRows` change them; `tests/engine/test_round_simulation.py` holds it against the real engine.  Between two events
nothing is decided, so all steps up to the next one are taken at once.  Does not know lanes, workers or rounds.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from itertools import islice

from batchgen_beam.engine.paging import pages_of
from batchgen_beam.engine.scheduler import Plan, PrefillChunk, RowView, Snapshot, schedule
from batchgen_beam.engine.sequence import Status
from batchgen_beam.models.caches import CacheKind, GroupKey
from batchgen_beam.settings import PAGE_TOKENS

__all__ = ["SimulatedEngine", "SimulatedRow", "StepCosts"]

GROUPS = (GroupKey(CacheKind.PAGED),)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Seconds of a step: `floor` for the weights, `token` for each token, and for each page that a token reads.

    A decoded token reads its pages alone (`page`), prompt tokens read theirs in blocks (`prefill_page`).
    """

    floor: float
    token: float
    page: float
    prefill_page: float


@dataclass(slots=True, eq=False)
class SimulatedRow:
    """A row that ends at a context of `target` tokens.  What follows its first line is the engine's."""

    key: str
    prompt: int
    context: int
    target: int
    seq_id: int = -1
    status: Status = Status.QUEUED
    computed: int = 0
    pages: int = 0
    due: int = 0
    visit_at: int = 0
    running: bool = False

    def view(self, *, full: bool = False) -> RowView:
        """The row as the scheduler sees it now."""
        return RowView(seq_id=self.seq_id, status=self.status, tokens=self.context, computed=self.computed,
                       pages=(self.pages,), full=full)


class SimulatedEngine:
    """`capacity` rows at once over `pages` KV pages; `clock` in seconds, `slowness` multiplies every step's cost."""

    def __init__(self, *, capacity: int, pages: int, costs: StepCosts, slowness: float = 1.0, step_tokens: int = 512,
                 prefill_chunk: int = 256) -> None:
        self.capacity = capacity
        self.clock = self.busy = 0.0
        self.steps = self.row_steps = self.evictions = self.prefilled = 0
        self._costs = costs
        self._slowness = slowness
        self._limits = step_tokens, prefill_chunk
        self._free = pages
        self._queue: deque[SimulatedRow] = deque()
        self._rows: dict[int, SimulatedRow] = {}
        self._views: dict[int, RowView] = {}
        self._due: list[tuple[int, int]] = []
        self._running = self._running_pages = 0
        self._next_id = 0
        self._changed = True

    @property
    def queued(self) -> int:
        """Rows that were never admitted."""
        return len(self._queue)

    @property
    def unanswered(self) -> int:
        """Rows in the engine."""
        return len(self._queue) + len(self._rows)

    def submit(self, row: SimulatedRow) -> None:
        """Queue a row."""
        row.seq_id, row.status, row.computed, row.pages = self._next_id, Status.QUEUED, 0, 0
        self._next_id += 1
        self._queue.append(row)
        self._changed = True

    def suspend(self, keys: set[str]) -> list[SimulatedRow]:
        """Rows leave the engine; their context is up to date, their pages are free."""
        leaving = [row for row in (*self._rows.values(), *self._queue) if row.key in keys]
        for row in leaving:
            if row.seq_id in self._rows:
                self._drop(row)
                del self._rows[row.seq_id], self._views[row.seq_id]
        self._queue = deque(row for row in self._queue if row.key not in keys)
        self._changed = True
        return leaving

    # The loop

    def step(self, until: float) -> list[SimulatedRow]:
        """Steps to the next event, but none that begins after `until`; gives the rows that ended."""
        plan = self._plan()
        self._apply(plan)
        number = 1 if plan.prefill or self._changed else self._quiet_steps(until)
        seconds = self._seconds(plan.prefill) if plan.prefill else number * self._seconds(())
        self.clock += seconds
        self.busy += seconds
        self.steps += number
        self.row_steps += number * self._running + len(plan.prefill)
        return self._visit(plan.prefill)

    def _quiet_steps(self, until: float) -> int:
        """Steps until a row is due, the one that makes it due included."""
        due = self._due[0][0] - self.steps if self._due else 1
        affordable = int((until - self.clock) / self._seconds(())) + 1 if until < float("inf") else due
        return max(1, min(due, affordable))

    def _plan(self) -> Plan:
        if not self._changed:
            return Plan()
        self._changed = False
        step_tokens, prefill_chunk = self._limits
        free_slots = self.capacity - sum(1 for row in self._rows.values() if row.status is not Status.EVICTED)
        return schedule(Snapshot(
            rows=tuple(self._views.values()), queue=tuple(row.view() for row in islice(self._queue, free_slots)),
            groups=GROUPS, free=(self._free,), free_host=(0,), free_slots=free_slots, step_tokens=step_tokens,
            prefill_chunk=prefill_chunk))

    def _apply(self, plan: Plan) -> None:
        for seq_id in plan.evict:
            row = self._rows[seq_id]
            self._drop(row)
            row.status, row.computed = Status.EVICTED, 0
            self._views[seq_id] = row.view()
            self.evictions += 1
        for seq_id in plan.extend:
            self._take_pages(self._rows[seq_id])
            self._run(self._rows[seq_id])
        for seq_id in plan.admit:
            row = self._rows.get(seq_id) or self._queue.popleft()
            assert row.seq_id == seq_id
            self._take_pages(row)
            row.status = Status.PREFILL
            self._rows[seq_id] = row
            self._views[seq_id] = row.view()

    def _seconds(self, chunks: tuple[PrefillChunk, ...]) -> float:
        """One step: every running row's token reads its pages, a prompt token those up to its own."""
        tokens, prefill_pages = self._running, 0.0
        for chunk in chunks:
            tokens += chunk.count
            prefill_pages += chunk.count * ((chunk.start + chunk.count / 2) / PAGE_TOKENS + 0.5)
        costs = self._costs
        attention = self._running_pages * costs.page + prefill_pages * costs.prefill_page
        return (costs.floor + tokens * costs.token + attention) * self._slowness

    # Events

    def _visit(self, chunks: tuple[PrefillChunk, ...]) -> list[SimulatedRow]:
        ended: list[SimulatedRow] = []
        for chunk in chunks:
            row = self._rows[chunk.seq_id]
            row.computed = chunk.start + chunk.count
            self.prefilled += chunk.count
            if row.computed == row.context:
                row.context += 1
            self._advance(row, ended)
        while self._due and self._due[0][0] <= self.steps:
            _, seq_id = heapq.heappop(self._due)
            row = self._rows[seq_id]
            self._stop(row)
            self._advance(row, ended)
        return ended

    def _advance(self, row: SimulatedRow, ended: list[SimulatedRow]) -> None:
        self._changed = True
        if row.context >= row.target:
            self._drop(row)
            del self._rows[row.seq_id], self._views[row.seq_id]
            ended.append(row)
        elif row.context - row.computed > 1 or row.context == row.prompt:
            self._views[row.seq_id] = row.view()
        else:
            row.status = Status.DECODE
            if row.context <= row.pages * PAGE_TOKENS:
                self._run(row)
            else:
                self._views[row.seq_id] = row.view(full=True)

    def _run(self, row: SimulatedRow) -> None:
        """Decode until the row ends, fills its pages or has lived for a page."""
        row.visit_at = min(row.target, row.pages * PAGE_TOKENS + 1, row.context + PAGE_TOKENS)
        row.due = self.steps + row.visit_at - row.context
        row.running = True
        heapq.heappush(self._due, (row.due, row.seq_id))
        self._running += 1
        self._running_pages += row.pages
        self._views[row.seq_id] = row.view()

    def _stop(self, row: SimulatedRow) -> None:
        """Bring a running row up to the present step."""
        row.context = row.visit_at - (row.due - self.steps)
        row.computed = row.context - 1
        row.running = False
        self._running -= 1
        self._running_pages -= row.pages

    def _drop(self, row: SimulatedRow) -> None:
        """Off the device: no pages, no place among the running."""
        if row.running:
            self._stop(row)
            self._due = [entry for entry in self._due if entry[1] != row.seq_id]
            heapq.heapify(self._due)
        self._free += row.pages
        row.pages = 0

    def _take_pages(self, row: SimulatedRow) -> None:
        lacking = pages_of(row.context) - row.pages
        self._free -= lacking
        row.pages += lacking
        assert self._free >= 0
