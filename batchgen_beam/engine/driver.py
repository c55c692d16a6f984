"""One thread that steps the engine, and a mailbox for each lane.

Owns the only thread that touches the engine.  Callers submit rows for a lane and wait for that lane's answers; if the
thread dies, its exception is raised in every waiter.  A row is known by its key until its answer is taken: rows of an
abandoned bundle go on and are there for its successor.  What has to outlive the process is told to a `Recorder` as it
happens, in the driver's thread.  Does not know Beam, text or files.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from batchgen_beam.engine.mailbox import Mailbox
from batchgen_beam.engine.stats import EngineStats
from batchgen_beam.errors import EngineError
from batchgen_beam.records import Answer, ContinuationRecord, EngineRow, Prompt

__all__ = ["Driver", "ForgetfulRecorder", "Recorder", "SteppedEngine"]

QUEUE_FACTOR = 2
"""Rows that may wait for a slot, as a multiple of the slots; more is congestion."""

SLOW_SECONDS = 0.05
AHEAD_SHARE, AHEAD_SHARE_SLOW = 32, 4
"""So small a part of the slots may wait inside the engine, so that the recorder is told of several rows at once; the
greater part where telling it took `SLOW_SECONDS`.  A row that waits counts as one that may have killed its process."""

CHECKPOINT_LOOKS = 4
"""So often within a checkpoint interval the engine is asked which rows are due."""


class Recorder(Protocol):
    """Who keeps what must not be lost.  Called in the driver's thread, between two steps."""

    checkpoint_seconds: float
    """A running row is recorded anew after this long, if it has grown enough."""

    def alone(self, row: EngineRow) -> bool:
        """Whether the row may only run while no other does."""
        ...

    def entering(self, rows: Collection[EngineRow]) -> None:
        """These are all rows that the engine has from now on; what it returns from may kill the process."""
        ...

    def answered(self, answers: Sequence[tuple[EngineRow, Answer]]) -> None:
        """Rows were answered."""
        ...

    def recorded(self, records: Sequence[ContinuationRecord]) -> None:
        """Rows have come so far.  Called now and then also where there are none."""
        ...


class SteppedEngine(Protocol):
    """What a driver steps; `Engine` says what each of these does."""

    def submit(self, row: EngineRow) -> None:
        """Queue a row."""

    def step(self) -> bool:
        """One step; False when there is nothing to do."""

    def poll(self) -> list[Answer]:
        """Answers since the last call."""

    def suspend(self, keys: Iterable[str]) -> list[ContinuationRecord]:
        """These rows leave."""

    def suspend_all(self) -> list[ContinuationRecord]:
        """All rows leave."""

    def checkpoint(self, seconds: float) -> list[ContinuationRecord]:
        """Records that are due."""

    def stats(self) -> EngineStats:
        """A reading."""


class ForgetfulRecorder:
    """Keeps nothing: for engines whose answers need not outlive them."""

    checkpoint_seconds = float("inf")

    def alone(self, row: EngineRow) -> bool:
        """Every row may have company."""
        return False

    def entering(self, rows: Collection[EngineRow]) -> None:
        """Nothing."""

    def answered(self, answers: Sequence[tuple[EngineRow, Answer]]) -> None:
        """Nothing."""

    def recorded(self, records: Sequence[ContinuationRecord]) -> None:
        """Nothing."""


class Driver:
    """Steps an engine in a daemon thread; every method may be called from any thread."""

    def __init__(self, engine: SteppedEngine, recorder: Recorder | None = None, *,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._recorder: Recorder = recorder or ForgetfulRecorder()
        self._clock = clock
        self._looked = clock()
        self._mutex = threading.Lock()
        self._work = threading.Condition(self._mutex)
        self._news = threading.Condition(self._mutex)
        self._inbox: deque[EngineRow] = deque()
        self._lonely: deque[EngineRow] = deque()
        self._inside: dict[str, EngineRow] = {}
        self._leaving: list[tuple[Mailbox, list[ContinuationRecord], threading.Event]] = []
        self._lanes: dict[str, Mailbox] = {}
        self._owners: dict[str, list[Mailbox]] = {}
        self._error: BaseException | None = None
        self._closing = False
        self._suspending = False
        self._ahead = 0
        self._fed = (0, 0)
        self._lanes_peak = 0
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="batchgen-engine", daemon=True)
        self._thread.start()

    # For the lanes

    def open_lane(self, lane: str, unfinished: Sequence[EngineRow] = ()) -> None:
        """The first touch of a lane in a bundle: its rows are to be submitted anew, also those of bundles before."""
        with self._mutex:
            self._check()
            self._lanes.setdefault(lane, Mailbox()).open()
        self.submit(lane, unfinished)

    def submit(self, lane: str, rows: Sequence[EngineRow]) -> None:
        """Ask for rows of a lane; a key that is known is not computed again."""
        with self._mutex:
            self._check()
            mailbox = self._lanes.setdefault(lane, Mailbox())
            for row in rows:
                key = row.key.text
                if mailbox.claim(key) and key not in mailbox.answers:
                    self._send(key, row, mailbox)
            self._lanes_peak = max(self._lanes_peak, sum(other.pending > 0 for other in self._lanes.values()))
            self._work.notify()

    def _send(self, key: str, row: EngineRow, mailbox: Mailbox) -> None:
        owners = self._owners.setdefault(key, [])
        if not owners:
            self._inbox.append(row)
        if mailbox not in owners:
            owners.append(mailbox)

    def fed(self, lane: str) -> None:
        """The lane has no more rows to submit."""
        with self._mutex:
            self._lanes[lane].feeding = False

    def take(self, lane: str, *, timeout: float) -> list[Answer]:
        """Answers of a lane that were not taken in this bundle; waits at most `timeout` seconds for the first.

        `EngineError`, with its cause, if the engine's thread has died.
        """
        with self._mutex:
            mailbox = self._lanes[lane]
            return self._take(mailbox, lambda: not mailbox.pending, timeout)

    def relieve(self, lane: str, *, timeout: float) -> list[Answer]:
        """What a congested caller waits for: answers of its lane, or room in the queue; at most `timeout` seconds."""
        with self._mutex:
            return self._take(self._lanes[lane], lambda: not self._crowded(), timeout)

    def _take(self, mailbox: Mailbox, enough: Callable[[], bool], timeout: float) -> list[Answer]:
        self._news.wait_for(lambda: mailbox.ready or enough() or self._stopped(), timeout)
        self._check()
        return mailbox.take()

    def suspend(self, lane: str) -> list[ContinuationRecord]:
        """MIGRATE: the lane's unanswered rows as records, by key; they leave the engine.

        Waits for the step under way.  Answers that have come are still there to be taken, and those of rows that
        another lane has asked for too will come.
        """
        with self._mutex:
            self._check()
            records: list[ContinuationRecord] = []
            done = threading.Event()
            self._leaving.append((self._lanes[lane], records, done))
            self._work.notify()
            self._news.wait_for(lambda: done.is_set() or self._stopped())
            self._check()
        return sorted(records, key=lambda record: record.key.text)

    def _disowned(self, mailbox: Mailbox) -> set[str]:
        """The lane's unanswered claims that are nobody else's; they are claims no more."""
        keys = {key for key in mailbox.unanswered() if self._owners[key] == [mailbox]}
        mailbox.give_up(keys)
        for key in keys:
            del self._owners[key]
        return keys

    def close_lane(self, lane: str) -> None:
        """The lane has been given all that it asked for: what is known of its rows goes."""
        with self._mutex:
            self._lanes.pop(lane, None)

    def pending(self, lane: str) -> int:
        """Rows of a lane whose answers were not taken in this bundle."""
        with self._mutex:
            return self._lanes[lane].pending

    def congested(self) -> bool:
        """Whether so many rows wait that a caller should rather take answers than submit more."""
        with self._mutex:
            return self._crowded()

    def _crowded(self) -> bool:
        return len(self._inbox) + self._stats.queued >= QUEUE_FACTOR * self._stats.capacity

    def may_refill(self) -> bool:
        """Whether rows may still come to the engine; the engine's thread asks, between two steps."""
        with self._mutex:
            return bool(self._inbox or self._lonely) or any(mailbox.feeding for mailbox in self._lanes.values())

    def unanswered(self) -> int:
        """Rows of all lanes that the engine has or will get."""
        with self._mutex:
            return len(self._owners)

    def stats(self) -> EngineStats:
        """The engine's last reading."""
        with self._mutex:
            return replace(self._stats, fed_steps=self._fed[0], fed_row_steps=self._fed[1],
                           lanes_peak=self._lanes_peak)

    def close(self, *, timeout: float | None = None, suspend: bool = False) -> None:
        """End the thread after its present step; waiters and later callers get an `EngineError`.

        `suspend`: rows under way are recorded first.
        """
        with self._mutex:
            self._closing = True
            self._suspending |= suspend
            self._work.notify_all()
            self._news.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def _stopped(self) -> bool:
        return self._error is not None or self._closing or not self._thread.is_alive()

    def _check(self) -> None:
        if self._error is not None:
            raise EngineError(f"the engine stopped: {self._error!r}") from self._error
        if self._closing:
            raise EngineError("the engine was closed")
        if not self._thread.is_alive():
            raise EngineError("the engine's thread is gone: the process was forked after the engine was loaded")

    # The thread

    def _run(self) -> None:
        try:
            while self._fetch():
                before = self._stats.row_steps
                self._engine.step()
                self._deliver(self._engine.poll(), before)
                self._record()
            if self._suspending:
                self._recorder.recorded([record for record in self._engine.suspend_all() if record.generated_ids])
        except BaseException as error:  # noqa: BLE001 - handed to every waiter by `_check`
            with self._mutex:
                self._error = error
                self._news.notify_all()

    def _fetch(self) -> bool:
        """Let rows go, move new ones to the engine, wait while there is nothing to do; False when closing."""
        with self._mutex:
            self._work.wait_for(lambda: self._inbox or self._leaving or self._closing or self._busy() or self._lonely)
            if self._closing:
                return False
            self._let_go()
            rows = self._admissible()
        if rows:
            self._enter(rows)
        return True

    def _enter(self, rows: Sequence[EngineRow]) -> None:
        """Give rows to the engine, once the recorder knows."""
        self._inside.update((row.key.text, row) for row in rows)
        started = self._clock()
        self._recorder.entering(self._inside.values())
        slow = self._clock() - started > SLOW_SECONDS
        self._ahead = self._stats.capacity // (AHEAD_SHARE_SLOW if slow else AHEAD_SHARE)
        for row in rows:
            self._engine.submit(row)

    def _let_go(self) -> None:
        """Serve those who wait in `suspend`."""
        for mailbox, records, done in self._leaving:
            records += self._suspended(self._disowned(mailbox))
            self._recorder.recorded([record for record in records if record.generated_ids])
            done.set()
        if self._leaving:
            self._leaving.clear()
            self._stats = self._engine.stats()
            self._news.notify_all()

    def _suspended(self, keys: set[str]) -> list[ContinuationRecord]:
        """These rows, out of the engine or from before its door."""
        records = self._engine.suspend(keys)
        for key in keys:
            self._inside.pop(key, None)
        for waiting in (self._inbox, self._lonely):
            leaving = [row for row in waiting if row.key.text in keys]
            records += [ContinuationRecord.begin(row) if isinstance(row, Prompt) else row for row in leaving]
            for row in leaving:
                waiting.remove(row)
        return records

    def _admissible(self) -> list[EngineRow]:
        """What enters the engine now: rows that may have company and find a slot soon, or one that may not."""
        rows: list[EngineRow] = []
        free = self._stats.capacity - len(self._inside)
        while self._inbox and free >= 0 and len(rows) < free + self._ahead:
            row = self._inbox.popleft()
            (self._lonely if self._recorder.alone(row) else rows).append(row)
        if not rows and not self._inside and self._lonely:
            return [self._lonely.popleft()]
        alone = bool(rows) and any(map(self._recorder.alone, self._inside.values()))
        if alone:
            self._inbox.extendleft(reversed(rows))
        return [] if alone else rows

    def _busy(self) -> bool:
        return self._stats.queued + self._stats.active + self._stats.waiting > 0

    def _deliver(self, answers: Sequence[Answer], row_steps_before: int) -> None:
        self._recorder.answered([(self._inside.pop(answer.key.text), answer) for answer in answers])
        with self._mutex:
            self._stats = self._engine.stats()
            more = self._stats.row_steps - row_steps_before
            if more and any(mailbox.feeding for mailbox in self._lanes.values()):
                self._fed = (self._fed[0] + 1, self._fed[1] + more)
            for answer in answers:
                key = answer.key.text
                for mailbox in self._owners.pop(key, ()):
                    mailbox.put(key, answer)
            self._news.notify_all()

    def _record(self) -> None:
        seconds = self._recorder.checkpoint_seconds
        now = self._clock()
        if now - self._looked >= seconds / CHECKPOINT_LOOKS:
            self._looked = now
            self._recorder.recorded(self._engine.checkpoint(seconds))
