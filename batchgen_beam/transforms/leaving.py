"""What a process has to do before it goes: everyone who holds rows is asked to leave them behind.

Owns the list of those who hold rows, weakly.  It is the one list of its process, since a signal handler can reach
nothing else.  Does not know signals, engines or files.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

__all__ = ["HOLDERS", "Holder", "Holders"]


class Holder(Protocol):
    """Who holds rows."""

    def suspend(self) -> None:
        """Stop, and leave behind what others need to go on; safe to repeat."""
        ...


class Holders:
    """The living holders of a process; any thread may enter and ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: weakref.WeakSet[Holder] = weakref.WeakSet()
        self._suspending = 0

    def enter(self, holder: Holder) -> None:
        """From now on it is asked, for as long as it lives."""
        with self._lock:
            self._holders.add(holder)

    def suspend_all(self) -> None:
        """Ask them all, one after the other; the first error is raised once all were asked."""
        with self._lock:
            holders = list(self._holders)
            self._suspending += 1
        errors = []
        for holder in holders:
            try:
                holder.suspend()
            except (OSError, RuntimeError) as error:
                errors.append(error)
        with self._lock:
            self._suspending -= 1
        if errors:
            raise errors[0]

    @property
    def suspending(self) -> bool:
        """Whether somebody is being asked now."""
        with self._lock:
            return self._suspending > 0


HOLDERS = Holders()
