"""The thread that writes a process's entries to the journal, so that who finds an answer never waits for a store.

Owns the buffer, its bound, and when a part is written: at `PART_ENTRIES` entries, at `PART_BYTES`, when the oldest
entry is `flush_age` old, and when somebody asks.  Does not know what entries mean.

How many parts a run leaves.  By size: rows / 4,096, or bytes / 8 MiB where entries are longer.  By age: the age grows
with the writer's life, so they are about 1 / `AGE_SHARE` (200) for each time that the life grows by the factor e.  For
10 million rows of 500 tokens (4.7 kB each before compression) on 8 processes in 10 days: 5,600 by size, at most
8 x 1,400 by age; under 20,000 in all, which is 20 pages of an object store's listing.  Their entries never wait longer
than 0.5 % of the time that the run has taken.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from batchgen_beam.errors import JournalError
from batchgen_beam.settings import JournalSettings
from batchgen_beam.storage.journal import Journal, Part
from batchgen_beam.storage.journal_rows import estimated_size
from batchgen_beam.storage.settling import Entry
from batchgen_beam.storage.store_errors import store_errors

__all__ = ["AGE_SHARE", "BUFFER_BYTES", "PART_BYTES", "PART_ENTRIES", "JournalWriter", "flush_age"]

LOG = logging.getLogger(__name__)

PART_ENTRIES = 4096
PART_BYTES = 8 << 20
"""Before compression."""
BUFFER_BYTES = 256 << 20
"""So much may wait; more means that the store can't be written to."""
AGE_SHARE = 0.005
RETRY_SECONDS = 5.0
"""After a failed write, unless somebody asks earlier."""


def flush_age(flush_seconds: float, life_seconds: float) -> float:
    """How old the oldest entry may get in a writer that has lived for so long: a small share of what it has done."""
    return max(flush_seconds, AGE_SHARE * life_seconds)


class JournalWriter:
    """A buffer of entries and the daemon thread that empties it.  All methods may be called from any thread."""

    def __init__(self, journal: Journal, run: str, settings: JournalSettings, *,
                 clock: Callable[[], float] = time.monotonic, buffer_bytes: int = BUFFER_BYTES) -> None:
        """`clock` gives seconds from any beginning."""
        self._journal = journal
        self._run = run
        self._flush_seconds = settings.flush_seconds
        self._clock = clock
        self._buffer_bytes = buffer_bytes
        self._begun = clock()
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Entry, int, float]] = deque()
        self._waiting_bytes = 0
        self._added = self._stored = self._asked = 0
        self._tries = self._failed_try = 0
        self._failure: Exception | None = None
        self._retry_at = 0.0
        self._closed = self._stopped = self._ended = False
        self.parts_written = 0
        self.bytes_written = 0
        self._thread = threading.Thread(target=self._work, name="batchgen-journal", daemon=True)
        self._thread.start()

    def add(self, entries: Iterable[Entry]) -> None:
        """Take entries over; never waits for a store.  A `JournalError` once too much waits."""
        now = self._clock()
        sized = [(entry, estimated_size(entry), now) for entry in entries]
        with self._changed:
            self._check_open()
            self._waiting.extend(sized)
            self._waiting_bytes += sum(size for _, size, _ in sized)
            self._added += len(sized)
            self._changed.notify_all()
            if self._waiting_bytes > self._buffer_bytes:
                raise self._error(f"{self._waiting_bytes >> 20} MiB of answers wait to be written")

    def flush(self) -> None:
        """Return once all that was added before is stored; a `JournalError` says why it can't be."""
        with self._changed:
            target, own_try = self._added, self._tries + 1
            while self._stored < target:
                if self._ended or self._failed_try >= own_try:
                    raise self._error("answers can't be written")
                if self._asked < target:  # also anew, where a write that had begun before has failed
                    self._asked = target
                    self._changed.notify_all()
                self._changed.wait()

    def close(self) -> None:
        """Take nothing more, flush, and end the thread, also where the flush fails."""
        with self._changed:
            self._closed = True
        try:
            self.flush()
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            self._thread.join()

    def _check_open(self) -> None:
        if self._closed or self._ended:
            raise self._error("its writer takes no more answers")

    def _error(self, what: str) -> JournalError:
        why = "" if self._failure is None else f" ({self._failure})"
        error = JournalError(f"journal {self._journal.folder}: {what}{why}; see that the store can be written to and "
                             "has space, then run the command again: what is stored is not computed again")
        error.__cause__ = self._failure
        return error

    # The thread

    def _work(self) -> None:
        try:
            while self._await_due():
                self._write_part(self._next_part())
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _await_due(self) -> bool:
        """Wait until a part is due; False when the thread is to end."""
        with self._changed:
            while not self._stopped:
                seconds = self._seconds_until_due()
                if seconds is not None and seconds <= 0:
                    return True
                self._changed.wait(seconds)
            return False

    def _seconds_until_due(self) -> float | None:
        """None while nothing waits."""
        if not self._waiting:
            return None
        full = len(self._waiting) >= PART_ENTRIES or self._waiting_bytes >= PART_BYTES
        if self._asked > self._stored or (full and self._failure is None):
            return 0.0
        if self._failure is not None:
            return self._retry_at - self._clock()
        now = self._clock()
        _, _, oldest = self._waiting[0]
        return oldest + flush_age(self._flush_seconds, now - self._begun) - now

    def _next_part(self) -> list[Entry]:
        """The oldest entries, as many as one part takes; they wait on until they are stored."""
        with self._changed:
            self._tries += 1
            part: list[Entry] = []
            size = 0
            for entry, length, _ in islice(self._waiting, PART_ENTRIES):
                part.append(entry)
                size += length
                if size >= PART_BYTES:
                    break
            return part

    def _write_part(self, entries: list[Entry]) -> None:
        try:
            part = self._journal.write(self._run, entries)
        except store_errors() as error:
            LOG.warning("%d entries of journal %s are not written yet: %s", len(entries), self._journal.folder, error)
            self._note_failure(error)
        else:
            self._note_stored(len(entries), part)

    def _note_failure(self, error: Exception) -> None:
        with self._changed:
            self._failure = error
            self._failed_try = self._tries
            self._asked = self._stored
            self._retry_at = self._clock() + RETRY_SECONDS
            self._changed.notify_all()

    def _note_stored(self, count: int, part: Part) -> None:
        with self._changed:
            self._failure = None
            for _ in range(count):
                _, size, _ = self._waiting.popleft()
                self._waiting_bytes -= size
            self._stored += count
            self.parts_written += 1
            self.bytes_written += part.size
            self._changed.notify_all()
