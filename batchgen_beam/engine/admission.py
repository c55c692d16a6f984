"""The rows that wait for their first admission, in the order in which they are best begun.

Longest first (Graham 1969, "LPT"): a long row that begins last runs on alone when all others have ended, and a step of
one row costs nearly as much as one of sixteen.  What nobody knows is not told apart: rows of equal expectation keep the
order in which they came, but those that begin with the same pages of tokens stand together, where the first of them
stands: what one of them computes is read by the others before its memory is wanted.  Does not decide how many enter.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from batchgen_beam.engine.round_plan import expected_remaining
from batchgen_beam.engine.sequence import Sequence

__all__ = ["AdmissionQueue"]


@dataclass(slots=True)
class _Prefix:
    """Pages that `rows` of the queue begin with; `came` is when the first one did."""

    came: int
    rows: int = 0


class AdmissionQueue:
    """Rows by expected remaining tokens, or with `longest_first` off as they came; with `by_prefix` off all prompts
    count as different."""

    def __init__(self, *, longest_first: bool = True, by_prefix: bool = True) -> None:
        self._longest_first = longest_first
        self._by_prefix = by_prefix
        self._rows: list[tuple[tuple[int, ...], Sequence]] = []
        self._prefixes: dict[bytes, _Prefix] = {}
        self._came = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Sequence]:
        return (row for _, row in self._rows)

    def add(self, row: Sequence) -> None:
        """Put a row into its place."""
        expected = 0
        if self._longest_first:
            expected = expected_remaining(prompt=len(row.prompt_ids), generated=len(row.generated), max_tokens=None,
                                          context_limit=row.limit)
        insort(self._rows, ((-expected, *self._enter(row), self._came), row), key=lambda entry: entry[0])
        self._came += 1

    def _digests(self, row: Sequence) -> Iterator[bytes]:
        pages = row.prompt_pages
        return (pages.digest(index) for index in range(len(pages) if self._by_prefix else 0))

    def _enter(self, row: Sequence) -> Iterator[int]:
        """When the first row came that shares one page with this one, two pages, and so on: the row's place among
        those that are expected to be as long."""
        for digest in self._digests(row):
            prefix = self._prefixes.setdefault(digest, _Prefix(self._came))
            prefix.rows += 1
            yield prefix.came

    def _leave(self, row: Sequence) -> None:
        for digest in self._digests(row):
            self._prefixes[digest].rows -= 1
            if not self._prefixes[digest].rows:
                del self._prefixes[digest]

    def first(self, count: int) -> list[Sequence]:
        """The next `count` rows, or all if there are fewer."""
        return [row for _, row in self._rows[:count]]

    def pop(self, count: int) -> list[Sequence]:
        """Take out the next `count` rows."""
        taken = self.first(count)
        del self._rows[:count]
        for row in taken:
            self._leave(row)
        return taken

    def take(self, keys: Collection[str]) -> list[Sequence]:
        """Take out the rows with these row key texts, in the order in which they came."""
        leaving = [entry for entry in self._rows if entry[1].key.text in keys]
        self._rows = [entry for entry in self._rows if entry[1].key.text not in keys]
        for _, row in leaving:
            self._leave(row)
        return [row for _, row in sorted(leaving, key=lambda entry: entry[0][-1])]
