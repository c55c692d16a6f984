"""How many pages a sequence needs in each cache group.  Pure arithmetic: no tensors, no owner of pages.

A *logical page* i of a sequence holds its positions `64 i .. 64 i + 63`.
"""

from __future__ import annotations

from batchgen_beam.models.caches import CacheKind, GroupKey
from batchgen_beam.settings import PAGE_TOKENS

__all__ = ["PageCounts", "live_pages", "page_counts", "pages_of", "useful_pages"]

PageCounts = tuple[int, ...]
"""One number for each cache group, in the order of the pool's groups."""


def pages_of(tokens: int) -> int:
    """Pages that `tokens` positions from 0 on touch."""
    return -(-tokens // PAGE_TOKENS)


def live_pages(group: GroupKey, computed: int, tokens: int) -> range:
    """Logical pages that must be there to process the positions `computed .. tokens - 1`.

    Every query at a position p >= `computed` of a windowed group sees keys j with p - j < window, so pages that lie
    wholly before `computed - window + 1` are not needed.  A `state` group has one slot, counted as one page.
    """
    if group.kind is CacheKind.STATE:
        return range(1)
    first = 0
    if group.window is not None:
        first = max(0, computed - group.window + 1) // PAGE_TOKENS
    return range(first, max(first, pages_of(tokens)))


def useful_pages(window: int | None, rows: int, context: int) -> int:
    """Pages of a paged group beyond which `rows` rows of at most `context` tokens have no use for more.

    With a window each keeps what the window touches, wherever it begins, and one page to grow into; rows enter with the
    pages of their whole context, which is there for one of them at a time.
    """
    whole = pages_of(context)
    if window is None:
        return rows * whole
    kept = min(whole, pages_of(window - 1) + 2)
    return rows * kept + whole - kept


def page_counts(groups: tuple[GroupKey, ...], computed: int, tokens: int) -> PageCounts:
    """`live_pages` of each group, counted."""
    return tuple(len(live_pages(group, computed, tokens)) for group in groups)
