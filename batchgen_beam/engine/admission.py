"""The rows that wait for their first admission, in the order in which they are best begun.

Longest first (Graham 1969, "LPT"): a long row that begins last runs on alone when all others have ended, and a step of
one row costs nearly as much as one of sixteen.  What nobody knows is not told apart: rows of equal expectation keep the
order in which they came.  Does not decide how many enter.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterator

from batchgen_beam.engine.round_plan import expected_remaining
from batchgen_beam.engine.sequence import Sequence

__all__ = ["AdmissionQueue"]


class AdmissionQueue:
    """Rows by expected remaining tokens, or with `longest_first` off as they came."""

    def __init__(self, *, longest_first: bool = True) -> None:
        self._longest_first = longest_first
        self._rows: list[tuple[int, int, Sequence]] = []
        self._came = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Sequence]:
        return (row for _, _, row in self._rows)

    def add(self, row: Sequence) -> None:
        """Put a row into its place."""
        expected = 0
        if self._longest_first:
            expected = expected_remaining(prompt=len(row.prompt_ids), generated=len(row.generated), max_tokens=None,
                                          context_limit=row.limit)
        insort(self._rows, (-expected, self._came, row), key=lambda entry: entry[:2])
        self._came += 1

    def first(self, count: int) -> list[Sequence]:
        """The next `count` rows, or all if there are fewer."""
        return [row for _, _, row in self._rows[:count]]

    def pop(self, count: int) -> list[Sequence]:
        """Take out the next `count` rows."""
        taken = self.first(count)
        del self._rows[:count]
        return taken

    def take(self, keys: Collection[str]) -> list[Sequence]:
        """Take out the rows with these row key texts, in the order in which they came."""
        leaving = [entry for entry in self._rows if entry[2].key.text in keys]
        self._rows = [entry for entry in self._rows if entry[2].key.text not in keys]
        return [row for _, _, row in sorted(leaving, key=lambda entry: entry[1])]
