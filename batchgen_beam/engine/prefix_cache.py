"""Full pages of prompt tokens that several sequences read, found by the tokens that led to them.

A `PrefixPage` is one logical page of a prefix: its parent is the page before it, its `pages` are one page of each cache
group.  A page is found by a digest over its tokens and its parent's digest *and* by comparing both, so that digests
which happen to be equal never give a row the wrong page.  `users` counts the sequences that read a page; one without
users stays until its memory is wanted, the leaves of a prefix first.  Owns no free list and no table, moves no bytes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from batchgen_beam.settings import PAGE_TOKENS

__all__ = ["PrefixCache", "PrefixPage", "PromptPages", "chained_digest"]


def chained_digest(parent: bytes, tokens: bytes) -> bytes:
    """The name of a page: BLAKE2b (RFC 7693), 16 bytes, of its parent's name (nothing for the first) and its tokens."""
    return hashlib.blake2b(parent + tokens, digest_size=16).digest()


class PromptPages:
    """The full pages of a prompt: their tokens as bytes and their digests, made when they are first asked for."""

    __slots__ = ("_digests", "_ids")

    def __init__(self, ids: array[int]) -> None:
        self._ids = ids
        self._digests: list[bytes] = []

    def __len__(self) -> int:
        return len(self._ids) // PAGE_TOKENS

    def tokens(self, index: int) -> bytes:
        """The token ids of a page."""
        return self._ids[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS].tobytes()

    def digest(self, index: int) -> bytes:
        """The name of a page, which tells all tokens up to its end."""
        while len(self._digests) <= index:
            parent = self._digests[-1] if self._digests else b""
            self._digests.append(chained_digest(parent, self.tokens(len(self._digests))))
        return self._digests[index]


class PrefixPage:
    """One page that may be shared; `number` names it to planners."""

    __slots__ = ("digest", "number", "pages", "parent", "tokens")

    def __init__(self, number: int, digest: bytes, tokens: bytes, parent: PrefixPage | None,
                 pages: tuple[int, ...]) -> None:
        self.number = number
        self.digest = digest
        self.tokens = tokens
        self.parent = parent
        self.pages = pages


class PrefixCache:
    """All shared pages of an engine.

    A sequence uses a prefix from its first page on, so whoever uses a page uses its ancestors: a page without users
    has only descendants without users.
    """

    def __init__(self) -> None:
        self._found: dict[bytes, PrefixPage] = {}
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, PrefixPage] = OrderedDict()
        self._numbers = 0

    @property
    def idle(self) -> int:
        """Pages that nobody uses."""
        return len(self._idle)

    @property
    def users(self) -> Mapping[int, int]:
        """How many sequences use each page, by its number; a view that changes with the cache."""
        return MappingProxyType(self._users)

    @property
    def pages(self) -> Iterable[PrefixPage]:
        """All of them."""
        return self._found.values()

    def find(self, prompt: PromptPages, index: int, parent: PrefixPage | None) -> PrefixPage | None:
        """The page with the prompt's tokens at `index` that follows `parent`."""
        page = self._found.get(prompt.digest(index))
        if page is None or page.parent is not parent or page.tokens != prompt.tokens(index):
            return None
        return page

    def add(self, prompt: PromptPages, index: int, parent: PrefixPage | None,
            pages: tuple[int, ...]) -> PrefixPage | None:
        """A new page with one user; None where another one has its digest."""
        digest = prompt.digest(index)
        if digest in self._found:
            return None
        page = PrefixPage(self._numbers, digest, prompt.tokens(index), parent, pages)
        self._numbers += 1
        self._found[digest] = page
        self._users[page.number] = 1
        return page

    def join(self, page: PrefixPage) -> None:
        """One more sequence uses the page, whose ancestors it uses already."""
        self._users[page.number] += 1
        self._idle.pop(page.number, None)

    def leave(self, prefix: Iterable[PrefixPage]) -> None:
        """A sequence uses these pages, first to last, no more.  Its last page is the first to go."""
        for page in reversed(list(prefix)):
            self._users[page.number] -= 1
            if not self._users[page.number]:
                self._idle[page.number] = page

    def drop(self) -> PrefixPage:
        """Forget the page that has been without users for longest, of which there is one.  It is always a leaf."""
        number, page = self._idle.popitem(last=False)
        del self._users[number], self._found[page.digest]
        return page

    def check_integrity(self, users: Mapping[int, int]) -> None:
        """Compare with the users that each page really has."""
        assert {number: count for number, count in self._users.items() if count} == dict(users)
        assert self._idle.keys() == {number for number, count in self._users.items() if not count}
        assert {page.number for page in self._found.values()} == self._users.keys()
        for page in self._found.values():
            parent = page.parent
            assert parent is None or (self._found.get(parent.digest) is parent
                                      and self._users[parent.number] >= self._users[page.number])
