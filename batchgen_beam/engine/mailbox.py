"""What one lane has asked an engine for and what has come.

Owns the claims of the present bundle and the answers that nobody took yet.  Not safe for several threads: its driver
holds a lock.  Keys are row key texts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set

from batchgen_beam.records import Answer

__all__ = ["Mailbox"]


class Mailbox:
    """`feeding`: the lane's bundle may still submit rows."""

    def __init__(self) -> None:
        self.claimed: set[str] = set()
        self.answers: dict[str, Answer] = {}
        self.feeding = False
        self._ready: deque[str] = deque()
        self._taken: set[str] = set()

    def open(self) -> None:
        """A new bundle: it claims its rows anew; answers that nobody took are kept for it."""
        self.claimed = set()
        self._taken = set()
        self._ready.clear()
        self.feeding = True

    def claim(self, key: str) -> bool:
        """Ask for a key in this bundle; False if that was done before."""
        if key in self.claimed:
            return False
        self.claimed.add(key)
        if key in self.answers:
            self._ready.append(key)
        return True

    def put(self, key: str, answer: Answer) -> None:
        """An answer has come."""
        self.answers[key] = answer
        if key in self.claimed:
            self._ready.append(key)

    def take(self) -> list[Answer]:
        """The claimed answers that were not taken."""
        keys = list(self._ready)
        self._ready.clear()
        self._taken.update(keys)
        return [self.answers.pop(key) for key in keys]

    def unanswered(self) -> set[str]:
        """Claims whose answers have not come."""
        return self.claimed - self._taken - self.answers.keys()

    def give_up(self, keys: Set[str]) -> None:
        """Claims no more."""
        self.claimed -= keys

    @property
    def ready(self) -> bool:
        """Whether there is something to take."""
        return bool(self._ready)

    @property
    def pending(self) -> int:
        """Claims whose answers were not taken in this bundle."""
        return len(self.claimed) - len(self._taken)
