"""What to do in the next step: a pure function from a frozen snapshot to a plan.

Policy, in this order: running rows get the page they need, oldest first, and where none is free the youngest is held
(if the host tier has room) or evicted; held and evicted rows come back, oldest first; then queued rows are admitted in
order; prompt tokens fill what the decode tokens leave of the step, where no other row is about to compute the same
ones.  The oldest admitted row is never evicted, and admission leaves one free page for each running row.  Ages are
sequence ids, so ties do not exist and the order of the snapshot does not matter.  Does not know tensors, owners of
pages or time.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from batchgen_beam.engine.paging import PageCounts, page_counts
from batchgen_beam.engine.sequence import Status
from batchgen_beam.models.caches import CacheKind, GroupKey

__all__ = ["Plan", "PrefillChunk", "RowView", "Schedule", "Snapshot", "schedule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowView:
    """A row as the scheduler sees it, true at its last event.

    `tokens` is its context, `computed` the positions with stored KV, `pages` what it has in each group, or would have
    at once if it entered: the first `prefix` of them are shared pages, by number.  `full` says that a DECODE row needs
    another page before it can run.
    """

    seq_id: int
    status: Status
    tokens: int
    computed: int
    pages: PageCounts
    prefix: tuple[int, ...] = ()
    full: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that a decision may depend on.  `queue` may be cut after `free_slots` rows; it is in order of age.

    `prefix_users` is how many rows on the device read each shared page; those that nobody reads are among the `free`.
    `followers` are rows whose next page another one is about to compute: they wait for it.
    """

    rows: tuple[RowView, ...]
    queue: tuple[RowView, ...]
    groups: tuple[GroupKey, ...]
    free: PageCounts
    free_host: PageCounts
    free_slots: int
    step_tokens: int
    prefill_chunk: int
    prefix_users: Mapping[int, int] = field(default_factory=dict)
    followers: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Process `count` context tokens of a row from position `start` on."""

    seq_id: int
    start: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Decisions, to be carried out in the order of the fields.  Every DECODE row that is left then runs one token."""

    hold: tuple[int, ...] = ()
    evict: tuple[int, ...] = ()
    extend: tuple[int, ...] = ()
    restore: tuple[int, ...] = ()
    admit: tuple[int, ...] = ()
    prefill: tuple[PrefillChunk, ...] = ()


Schedule = Callable[[Snapshot], Plan]

_RUNNING = (Status.PREFILL, Status.DECODE)


@dataclass(slots=True)
class _Ledger:
    """What is left while the plan grows; `running` is in order of age."""

    groups: tuple[GroupKey, ...]
    free: list[int]
    free_host: list[int]
    slots: int
    running: list[RowView]
    prefix_users: Mapping[int, int]
    users_now: dict[int, int] = field(default_factory=dict)
    hold: list[int] = field(default_factory=list)
    evict: list[int] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)

    def fits(self, need: PageCounts, *, reserve: int = 0) -> bool:
        """Whether the pages are there and `reserve` more stay free, in groups whose sequences can grow."""
        return all(
            wanted + (0 if group.kind is CacheKind.STATE else reserve) <= left
            for group, wanted, left in zip(self.groups, need, self.free, strict=True)
        )

    def take(self, need: PageCounts) -> None:
        """Count pages as used."""
        self.free = [left - wanted for wanted, left in zip(need, self.free, strict=True)]

    def users(self, page: int) -> int:
        """Rows that read a shared page after what was decided so far."""
        return self.users_now.get(page, self.prefix_users.get(page, 0))

    def lack(self, row: RowView, need: PageCounts) -> PageCounts:
        """What of a row's need has to be taken: not the shared pages that are in use."""
        shared = sum(self.users(page) > 0 for page in row.prefix)
        return tuple(wanted - shared for wanted in need)

    def enter(self, row: RowView) -> None:
        """The row reads its prefix from now on."""
        for page in row.prefix:
            self.users_now[page] = self.users(page) + 1

    def leave(self, row: RowView) -> None:
        """Count a row's pages as free, shared ones once nobody reads them."""
        still_read = 0
        for page in row.prefix:
            self.users_now[page] = self.users(page) - 1
            still_read += self.users_now[page] > 0
        self.free = [left + owned - still_read for owned, left in zip(row.pages, self.free, strict=True)]

    def preempt_youngest(self) -> None:
        """Take the youngest running row off the device, to the host tier where that has room."""
        victim = self.running.pop()
        self.gone.add(victim.seq_id)
        self.leave(victim)
        self.slots += 1
        roomy = all(owned <= left for owned, left in zip(victim.pages, self.free_host, strict=True))
        if victim.status is Status.DECODE and roomy and any(victim.pages):
            self.free_host = [left - owned for owned, left in zip(victim.pages, self.free_host, strict=True)]
            self.hold.append(victim.seq_id)
        else:
            self.evict.append(victim.seq_id)


def schedule(snapshot: Snapshot) -> Plan:
    """The next step's plan.  Some row makes progress in every step, as long as each row fits the pool alone."""
    rows = sorted(snapshot.rows, key=_age)
    running = [row for row in rows if row.status in _RUNNING]
    waiting = [row for row in rows if row.status not in _RUNNING]
    ledger = _Ledger(snapshot.groups, list(snapshot.free), list(snapshot.free_host), snapshot.free_slots, running,
                     snapshot.prefix_users)
    extend = _extend(snapshot, ledger)
    entered = [] if ledger.gone else _enter_in_order(snapshot, ledger, (*waiting, *snapshot.queue))
    return Plan(
        hold=tuple(ledger.hold),
        evict=tuple(ledger.evict),
        extend=extend,
        restore=tuple(row.seq_id for row in entered if row.status is Status.HELD),
        admit=tuple(row.seq_id for row in entered if row.status is not Status.HELD),
        prefill=_prefill(snapshot, ledger),
    )


def _age(row: RowView) -> int:
    return row.seq_id


def _extend(snapshot: Snapshot, ledger: _Ledger) -> tuple[int, ...]:
    """Pages for running rows whose last page is full; the youngest give way."""
    extended: list[int] = []
    for row in [row for row in ledger.running if row.full]:
        need = _missing(snapshot, row)
        while row.seq_id not in ledger.gone and not ledger.fits(need):
            ledger.preempt_youngest()
        if row.seq_id not in ledger.gone:
            ledger.take(need)
            extended.append(row.seq_id)
    return tuple(extended)


def _missing(snapshot: Snapshot, row: RowView) -> PageCounts:
    needed = page_counts(snapshot.groups, row.computed, row.tokens)
    return tuple(max(0, wanted - owned) for wanted, owned in zip(needed, row.pages, strict=True))


def _enter_in_order(snapshot: Snapshot, ledger: _Ledger, waiting: tuple[RowView, ...]) -> list[RowView]:
    """Rows that get a slot and all pages of their context, strictly by age, one free page left for each running row."""
    entered: list[RowView] = []
    for row in waiting:
        need = page_counts(snapshot.groups, 0, row.tokens)
        if row.status is Status.HELD:
            need = tuple(map(max, row.pages, page_counts(snapshot.groups, row.computed, row.tokens)))
        need = ledger.lack(row, need)
        if ledger.slots < 1 or not ledger.fits(need, reserve=len(ledger.running)):
            break
        ledger.take(need)
        ledger.enter(row)
        ledger.slots -= 1
        insort(ledger.running, row, key=_age)
        entered.append(row)
    return entered


def _prefill(snapshot: Snapshot, ledger: _Ledger) -> tuple[PrefillChunk, ...]:
    """Prompt chunks, oldest first, in what the decode rows leave of the step, which is at least a quarter of it."""
    prompts = [row for row in ledger.running if row.status not in (Status.DECODE, Status.HELD)]
    budget = max(snapshot.step_tokens - (len(ledger.running) - len(prompts)), snapshot.step_tokens // 4, 1)
    chunks: list[PrefillChunk] = []
    for row in prompts:
        if row.seq_id in snapshot.followers:
            continue
        left = row.tokens - row.computed
        count = min(left, snapshot.prefill_chunk, budget) if snapshot.prefill_chunk else left
        if budget > 0:
            chunks.append(PrefillChunk(row.seq_id, row.computed, count))
        budget -= count
    return tuple(chunks)
