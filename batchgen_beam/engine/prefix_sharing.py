"""Which rows read a prefix that others have computed, and which wait for one that is under way.

A row that begins, or begins again, reads the longest prefix of its prompt that is there; one token at least is left to
compute, since its logits are wanted.  While a row has pages of its prompt before it, it looks again before every step:
if the next page is there, it is read; if another row is about to compute it, this row waits.  Of rows that want the
same page the first is the one that computes, so somebody always does.  Does not decide who runs.
"""

from __future__ import annotations

from batchgen_beam.engine.kv_pool import KVPool
from batchgen_beam.engine.prefix_cache import PrefixPage
from batchgen_beam.engine.sequence import Sequence
from batchgen_beam.settings import PAGE_TOKENS

__all__ = ["Look", "find_prefix", "read_prefix"]


def find_prefix(row: Sequence, pool: KVPool) -> list[PrefixPage]:
    """Pages that the row could read from where it stands on."""
    if row.computed != len(pool.shared(row.seq_id)) * PAGE_TOKENS:
        return []
    return pool.match(row.seq_id, row.prompt_pages, _readable(row))


def read_prefix(row: Sequence, pool: KVPool) -> bool:
    """Read what there is; whether there was anything."""
    found = find_prefix(row, pool)
    if found:
        pool.adopt(row.seq_id, found)
        row.found_to(len(pool.shared(row.seq_id)) * PAGE_TOKENS)
    return bool(found)


def _readable(row: Sequence) -> int:
    """Pages of the prompt that the row may read: at least one token of its context is left."""
    return (row.context - 1) // PAGE_TOKENS


class Look:
    """One look at the rows that have prompt pages to compute: those on the device first, and each kind by age."""

    def __init__(self) -> None:
        self.followers: set[int] = set()
        self._leaders: set[bytes] = set()

    def see(self, row: Sequence, shared: int, computed: int) -> None:
        """A row with `shared` pages of a prefix and `computed` positions computes its next page, or follows another
        one that does."""
        if computed // PAGE_TOKENS != shared or shared >= len(row.prompt_pages):
            return
        name = row.prompt_pages.digest(shared)
        if name in self._leaders and computed % PAGE_TOKENS == 0 and shared < _readable(row):
            self.followers.add(row.seq_id)
        self._leaders.add(name)
