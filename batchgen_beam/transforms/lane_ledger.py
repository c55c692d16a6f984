"""What one bundle knows about one lane: which rows are unfinished, and what Beam's state holds of the lane.

Owns the arithmetic of the two bags of the stateful step (`admitted` minus `done` is what is unfinished) and when they
are rewritten.  Pure: does not touch Beam, the engine or text.
"""

from __future__ import annotations

from collections.abc import Iterable

from batchgen_beam.records import Answer, EngineRow

__all__ = ["COMPACT_FROM", "LaneLedger"]

COMPACT_FROM = 64
"""Below this many done rows the bags are left alone."""


class LaneLedger:
    """Rows of a lane by row key text.  Every admitted row is unfinished until `accept` lets its answer out, once."""

    def __init__(self, admitted: Iterable[EngineRow] = (), done: Iterable[str] = ()) -> None:
        self._done = set(done)
        self._unfinished: dict[str, EngineRow] = {}
        self._early: dict[str, Answer] = {}
        self._admitted_in_state = 0
        for row in admitted:
            self._admitted_in_state += 1
            if row.key.text not in self._done:
                self._unfinished[row.key.text] = row
        self._done_in_state = len(self._done)

    @property
    def unfinished(self) -> list[EngineRow]:
        """Rows without an answer, in the order of admission."""
        return list(self._unfinished.values())

    def admit(self, rows: Iterable[EngineRow]) -> list[EngineRow]:
        """The rows that the lane has not met before; they are unfinished now.  Equal keys are computed once."""
        fresh = []
        for row in rows:
            key = row.key.text
            if key not in self._done and key not in self._unfinished:
                self._unfinished[key] = row
                fresh.append(row)
        self._admitted_in_state += len(fresh)
        return fresh

    def keep(self, answers: Iterable[Answer]) -> None:
        """Answers that are known before anybody was asked; `take_early` gives them."""
        for answer in answers:
            self._early[answer.key.text] = answer

    def leave(self, key: str) -> None:
        """An unfinished row goes on elsewhere."""
        del self._unfinished[key]
        self._done.add(key)
        self._done_in_state += 1

    def take_early(self) -> list[Answer]:
        """Answers that came before their row did and whose row is here now."""
        ready = [key for key in self._early if key in self._unfinished]
        return [self._early.pop(key) for key in ready]

    def accept(self, answer: Answer) -> EngineRow | None:
        """The row of an answer that may leave the step: it was unfinished, and is done afterwards.

        None otherwise.  An abandoned bundle may have left a row in the engine that its successor has not read yet: such
        an answer is kept until the row arrives.  The answer of a row that is done already is dropped.
        """
        key = answer.key.text
        if key in self._done:
            return None
        row = self._unfinished.get(key)
        if row is None:
            self._early[key] = answer
            return None
        self.leave(key)
        return row

    def wants_compaction(self) -> bool:
        """Whether over half of what the state holds is done."""
        return self._done_in_state >= COMPACT_FROM and 2 * self._done_in_state > self._admitted_in_state

    def compacted(self) -> list[EngineRow]:
        """The rows that the rewritten state has to hold; no key needs to be marked done in it."""
        self._admitted_in_state = len(self._unfinished)
        self._done_in_state = 0
        return self.unfinished
