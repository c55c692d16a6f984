"""Who owns which page.  Owns the free lists of both tiers, every sequence's page table, and the shared prefixes.

Page 0 of each group is the zero page: it fills unused table entries and is never handed out.  Reserving is all or
nothing, and nothing is owned before `commit`.  A sequence's first pages may be those of a prefix that others read too:
full pages, which nobody writes again.  Those that nobody reads any more count as free.  Moves no bytes: `hold` and
`restore` return the copies to be done.  Does not know tensors, statuses or scheduling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from batchgen_beam.engine.paging import PageCounts, live_pages
from batchgen_beam.engine.prefix_cache import PrefixCache, PrefixPage, PromptPages
from batchgen_beam.models.caches import CacheKind, GroupKey
from batchgen_beam.settings import PAGE_TOKENS

__all__ = ["KVPool", "PageCopy", "PoolExhausted", "Reservation"]

IDLE_SHARE = 8
"""Prefixes that nobody reads may keep one page in so many before others would have to touch fresh memory: most prompts
are never seen again, and first use of memory costs more than many a prompt."""


class PoolExhausted(Exception):
    """A reservation does not fit; everything it had taken was given back."""


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy page `source` of one tier to page `target` of the other, in all layers of the group."""

    group: GroupKey
    source: int
    target: int


@dataclass(slots=True)
class _Table:
    """Pages of one sequence in one group: `pages[i]` is logical page `first + i`."""

    first: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first + len(self.pages)


class _Tier:
    """Free list of one group on one tier; pages 1 .. count - 1 can be handed out, those last that never were.

    `fresh` counts the latter: their memory is taken when they are first written.
    """

    def __init__(self, count: int) -> None:
        self.usable = max(count - 1, 0)
        self.free = list(range(count - 1, 0, -1))
        self.fresh = self.usable
        self.allocated = 0
        self.freed = 0

    def take(self, number: int) -> list[int]:
        if number > len(self.free):
            raise PoolExhausted(f"{number} pages wanted, {len(self.free)} of {self.usable} free")
        self.allocated += number
        self.fresh = min(self.fresh, len(self.free) - number)
        return [self.free.pop() for _ in range(number)]

    def give(self, pages: Iterable[int]) -> None:
        before = len(self.free)
        self.free.extend(pages)
        self.freed += len(self.free) - before


@dataclass(frozen=True, slots=True)
class Reservation:
    """Pages taken from the free lists for some sequences, owned by nobody yet."""

    pages: tuple[tuple[int, GroupKey, int, tuple[int, ...]], ...]
    """(sequence, group, first logical page, page ids)."""

    def of_group(self, group: GroupKey) -> list[int]:
        """All page ids of one group, to be cleared before use."""
        return [page for _, key, _, pages in self.pages if key == group for page in pages]


class KVPool:
    """Pages of all cache groups on the device tier and the host tier."""

    def __init__(self, device_pages: Mapping[GroupKey, int], host_pages: Mapping[GroupKey, int] | None = None, *,
                 share: bool = True) -> None:
        """Counts include the zero page.  Without `host_pages` nothing can be held.

        Prefixes are shared if `share` and every group keeps all past tokens: where a window or a state has moved on, a
        prefix can't be read any more.
        """
        self.groups = tuple(device_pages)
        self._device = {group: _Tier(count) for group, count in device_pages.items()}
        self._host = {group: _Tier((host_pages or {}).get(group, 0)) for group in self.groups}
        self._tables: dict[int, dict[GroupKey, _Table]] = {}
        self._held: dict[int, dict[GroupKey, _Table]] = {}
        self._prefixes = PrefixCache()
        self._shared: dict[int, list[PrefixPage]] = {}
        self.shares = share and all(group == GroupKey(CacheKind.PAGED) for group in self.groups)

    # What there is

    @property
    def free(self) -> PageCounts:
        """Device pages of each group that are free or can be made so at once."""
        return tuple(len(self._device[group].free) + self._prefixes.idle for group in self.groups)

    @property
    def free_host(self) -> PageCounts:
        """Free host pages of each group."""
        return tuple(len(self._host[group].free) for group in self.groups)

    @property
    def usable(self) -> PageCounts:
        """Device pages of each group that can be handed out."""
        return tuple(self._device[group].usable for group in self.groups)

    def held_pages(self, sequence: int) -> PageCounts:
        """Pages of a sequence in each group, on whichever tier it is."""
        tables = self._tables.get(sequence) or self._held.get(sequence) or {}
        return tuple(len(tables[group].pages) if group in tables else 0 for group in self.groups)

    def table(self, sequence: int, group: GroupKey) -> tuple[int, list[int]]:
        """First logical page, and the device pages from there on."""
        table = self._tables[sequence][group]
        return table.first, table.pages

    def capacity(self, sequence: int) -> int | None:
        """Positions that the sequence's device pages cover; None if no group of it grows with the context."""
        ends = [table.end for group, table in self._tables[sequence].items() if group.kind is not CacheKind.STATE]
        return min(ends) * PAGE_TOKENS if ends else None

    # Reserve, commit, release

    def reserve(self, wishes: Iterable[tuple[int, int, int]]) -> Reservation:
        """Take the pages that sequences lack to process positions `computed .. tokens - 1`.

        `wishes` are (sequence, computed, tokens).  `PoolExhausted` if not all of them fit, and then none is taken.
        """
        taken: list[tuple[int, GroupKey, int, tuple[int, ...]]] = []
        try:
            for sequence, computed, tokens in wishes:
                for group in self.groups:
                    missing = self._missing(sequence, group, computed, tokens)
                    taken.append((sequence, group, missing.start, tuple(self._take(group, len(missing)))))
        except PoolExhausted:
            self.cancel(Reservation(tuple(taken)))
            raise
        return Reservation(tuple(entry for entry in taken if entry[3]))

    def _take(self, group: GroupKey, number: int) -> list[int]:
        """Pages of one group; prefixes that nobody reads give way where no memory is left, and beyond their share."""
        tier = self._device[group]
        while number > len(tier.free) - tier.fresh and self._prefixes.idle > tier.usable // IDLE_SHARE:
            self._drop_prefix()
        while number > len(tier.free) and self._prefixes.idle:
            self._drop_prefix()
        return tier.take(number)

    def _drop_prefix(self) -> None:
        for group, page in zip(self.groups, self._prefixes.drop().pages, strict=True):
            self._device[group].give([page])

    def _missing(self, sequence: int, group: GroupKey, computed: int, tokens: int) -> range:
        needed = live_pages(group, computed, tokens)
        tables = self._tables.get(sequence)
        if tables is None or not tables[group].pages:
            return needed
        return range(tables[group].end, max(needed.stop, tables[group].end))

    def cancel(self, reservation: Reservation) -> None:
        """Give back what was reserved and not committed."""
        for _, group, _, pages in reservation.pages:
            self._device[group].give(pages)

    def commit(self, reservation: Reservation) -> None:
        """Make the sequences own their reserved pages."""
        for sequence, group, first, pages in reservation.pages:
            table = self._own_tables(sequence)[group]
            if not table.pages:
                table.first = first
            assert table.end == first, (sequence, group, table, first)
            table.pages.extend(pages)

    def _own_tables(self, sequence: int) -> dict[GroupKey, _Table]:
        return self._tables.setdefault(sequence, {key: _Table() for key in self.groups})

    def release(self, sequence: int) -> None:
        """Free all pages of a sequence on both tiers; a sequence without pages is fine."""
        prefix = self._shared.pop(sequence, [])
        self._prefixes.leave(prefix)
        for owners, tiers, shared in ((self._tables, self._device, len(prefix)), (self._held, self._host, 0)):
            for group, table in owners.pop(sequence, {}).items():
                tiers[group].give(table.pages[shared:])

    def trim(self, sequence: int, computed: int) -> None:
        """Free pages that lie behind the window of every position >= `computed`."""
        for group, table in self._tables[sequence].items():
            behind = min(live_pages(group, computed, computed + 1).start, table.end) - table.first
            if behind > 0:
                self._device[group].give(table.pages[:behind])
                del table.pages[:behind]
                table.first += behind

    # Prefixes

    @property
    def prefix_users(self) -> Mapping[int, int]:
        """How many sequences read each page of a prefix, by its number."""
        return self._prefixes.users

    def shared(self, sequence: int) -> list[PrefixPage]:
        """The first pages of a sequence that others may read too."""
        return self._shared.get(sequence, [])

    def _deepest(self, sequence: int) -> PrefixPage | None:
        shared = self.shared(sequence)
        return shared[-1] if shared else None

    def match(self, sequence: int, prompt: PromptPages, limit: int) -> list[PrefixPage]:
        """Pages that are there and follow those which the sequence shares already, up to `limit` pages in all."""
        if not self.shares:
            return []
        parent = self._deepest(sequence)
        found: list[PrefixPage] = []
        for index in range(len(self.shared(sequence)), min(limit, len(prompt))):
            page = self._prefixes.find(prompt, index, parent)
            if page is None:
                break
            found.append(page)
            parent = page
        return found

    def adopt(self, sequence: int, pages: Iterable[PrefixPage]) -> None:
        """The sequence reads these pages from now on, which follow those that it shares; its own there become free."""
        tables = self._own_tables(sequence)
        shared = self._shared.setdefault(sequence, [])
        for page in pages:
            assert page.parent is self._deepest(sequence), (sequence, page.number)
            index = len(shared)
            for group, one in zip(self.groups, page.pages, strict=True):
                table = tables[group]
                self._device[group].give(table.pages[index : index + 1])
                table.pages[index : index + 1] = [one]
            self._prefixes.join(page)
            shared.append(page)

    def publish(self, sequence: int, prompt: PromptPages, computed: int) -> None:
        """The sequence's own full pages of the prompt, computed up to position `computed`, can be read by others.

        Where an equal page is there, the sequence reads that one, so that a prefix is kept once.
        """
        if not self.shares:
            return
        shared = self._shared.setdefault(sequence, [])
        for index in range(len(shared), min(computed // PAGE_TOKENS, len(prompt))):
            equal = self.match(sequence, prompt, index + 1)
            if equal:
                self.adopt(sequence, equal)
                continue
            own = tuple(self._tables[sequence][group].pages[index] for group in self.groups)
            page = self._prefixes.add(prompt, index, self._deepest(sequence), own)
            if page is None:
                return
            shared.append(page)

    # The host tier

    def hold(self, sequence: int) -> list[PageCopy]:
        """Move a sequence to the host tier; the copies must be done before any page is handed out again.

        There it has pages of its own alone.
        """
        copies = self._move(sequence, (self._tables, self._device), self._held, self.free_host,
                            lambda group, number: self._host[group].take(number))
        self._prefixes.leave(self._shared.pop(sequence, []))
        return copies

    def restore(self, sequence: int) -> list[PageCopy]:
        """Move a sequence back to the device tier."""
        return self._move(sequence, (self._held, self._host), self._tables, self.free, self._take)

    def _move(self, sequence: int, source: _Side, new_owners: _Owners, free: PageCounts,
              take: Callable[[GroupKey, int], list[int]]) -> list[PageCopy]:
        """From a tier to where `free` pages of each group can be had by `take`."""
        owners, tiers = source
        for (group, table), left in zip(owners[sequence].items(), free, strict=True):
            if len(table.pages) > left:
                raise PoolExhausted(f"sequence {sequence} needs {len(table.pages)} pages of {group}, {left} free")
        shared = len(self.shared(sequence))
        copies: list[PageCopy] = []
        moved: dict[GroupKey, _Table] = {}
        for group, table in owners.pop(sequence).items():
            pages = take(group, len(table.pages))
            copies += [PageCopy(group, old, new) for old, new in zip(table.pages, pages, strict=True)]
            tiers[group].give(table.pages[shared:])
            moved[group] = _Table(table.first, pages)
        new_owners[sequence] = moved
        return copies

    # Self-check

    def check_integrity(self) -> None:
        """Every page is free, owned or shared, once; page 0 is neither; counters and users balance."""
        for owners, tiers in ((self._tables, self._device), (self._held, self._host)):
            for index, (group, tier) in enumerate(tiers.items()):
                owned = [page for sequence, tables in owners.items()
                         for page in tables[group].pages[len(self.shared(sequence)) :]]
                if tiers is self._device:
                    owned += [page.pages[index] for page in self._prefixes.pages]
                assert sorted(owned + tier.free) == list(range(1, tier.usable + 1)), (group, owned, tier.free)
                assert tier.allocated - tier.freed == len(owned), (group, tier.allocated, tier.freed, len(owned))
        assert not self._tables.keys() & self._held.keys()
        self._prefixes.check_integrity(Counter(page.number for prefix in self._shared.values() for page in prefix))
        for sequence, prefix in self._shared.items():
            for index, group in enumerate(self.groups if prefix else ()):
                assert self.table(sequence, group)[1][: len(prefix)] == [page.pages[index] for page in prefix]


_Owners = dict[int, dict[GroupKey, _Table]]
_Side = tuple[_Owners, dict[GroupKey, _Tier]]
