"""One thread that steps the engine, and a mailbox for each lane.

Owns the only thread that touches the engine.  Callers submit rows for a lane and wait for that lane's answers; if the
thread dies, its exception is raised in every waiter.  A row is known by its key until its answer is taken: rows of an
abandoned bundle go on and are there for its successor, and only answers that the abandoned bundle took are computed
again, with the same bits.  Does not know Beam or text.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from batchgen_beam.engine.engine import Engine
from batchgen_beam.engine.stats import EngineStats
from batchgen_beam.errors import EngineError
from batchgen_beam.records import Answer, Prompt

__all__ = ["Driver"]

QUEUE_FACTOR = 2
"""Rows that may wait for a slot, as a multiple of the slots; more is congestion."""


class _Mailbox:
    """What one lane has asked for and what has come; keys are row key texts."""

    def __init__(self) -> None:
        self.claimed: set[str] = set()
        self.answers: dict[str, Answer] = {}
        self.ready: deque[str] = deque()
        self.taken = 0

    def open(self) -> None:
        """A new bundle: it claims its rows anew; answers that nobody took are kept for it."""
        self.claimed = set()
        self.taken = 0
        self.ready.clear()

    def claim(self, key: str) -> bool:
        """Ask for a key in this bundle; False if that was done before."""
        if key in self.claimed:
            return False
        self.claimed.add(key)
        if key in self.answers:
            self.ready.append(key)
        return True

    def put(self, key: str, answer: Answer) -> None:
        self.answers[key] = answer
        if key in self.claimed:
            self.ready.append(key)

    def take(self) -> list[Answer]:
        keys = list(self.ready)
        self.ready.clear()
        self.taken += len(keys)
        return [self.answers.pop(key) for key in keys]

    @property
    def pending(self) -> int:
        return len(self.claimed) - self.taken


class Driver:
    """Steps an engine in a daemon thread; every method may be called from any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._mutex = threading.Lock()
        self._work = threading.Condition(self._mutex)
        self._news = threading.Condition(self._mutex)
        self._inbox: deque[Prompt] = deque()
        self._lanes: dict[str, _Mailbox] = {}
        self._owners: dict[str, list[_Mailbox]] = {}
        self._error: BaseException | None = None
        self._closing = False
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="batchgen-engine", daemon=True)
        self._thread.start()

    # For the lanes

    def open_lane(self, lane: str, unfinished: Sequence[Prompt]) -> None:
        """The first touch of a lane in a bundle: `unfinished` is all that was admitted and not durably yielded."""
        with self._mutex:
            self._check()
            self._lanes.setdefault(lane, _Mailbox()).open()
        self.submit(lane, unfinished)

    def submit(self, lane: str, prompts: Sequence[Prompt]) -> None:
        """Ask for rows of a lane; a key that is known is not computed again."""
        with self._mutex:
            self._check()
            mailbox = self._lanes.setdefault(lane, _Mailbox())
            for prompt in prompts:
                key = prompt.key.text
                if mailbox.claim(key) and key not in mailbox.answers:
                    self._send(key, prompt, mailbox)
            self._work.notify()

    def _send(self, key: str, prompt: Prompt, mailbox: _Mailbox) -> None:
        owners = self._owners.setdefault(key, [])
        if not owners:
            self._inbox.append(prompt)
        if mailbox not in owners:
            owners.append(mailbox)

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

    def _take(self, mailbox: _Mailbox, enough: Callable[[], bool], timeout: float) -> list[Answer]:
        self._news.wait_for(lambda: mailbox.ready or enough() or self._stopped(), timeout)
        self._check()
        return mailbox.take()

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

    def stats(self) -> EngineStats:
        """The engine's last reading."""
        with self._mutex:
            return self._stats

    def close(self, *, timeout: float | None = None) -> None:
        """End the thread after its present step; waiters and later callers get an `EngineError`."""
        with self._mutex:
            self._closing = True
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
                self._engine.step()
                self._deliver(self._engine.poll())
        except BaseException as error:  # noqa: BLE001 - handed to every waiter by `_check`
            with self._mutex:
                self._error = error
                self._news.notify_all()

    def _fetch(self) -> bool:
        """Move new rows to the engine, waiting for some while it is idle; False when closing."""
        with self._mutex:
            self._work.wait_for(lambda: self._inbox or self._closing or self._busy())
            prompts = list(self._inbox)
            self._inbox.clear()
            if self._closing:
                return False
        for prompt in prompts:
            self._engine.submit(prompt)
        return True

    def _busy(self) -> bool:
        return self._stats.queued + self._stats.active + self._stats.waiting > 0

    def _deliver(self, answers: Sequence[Answer]) -> None:
        with self._mutex:
            self._stats = self._engine.stats()
            for answer in answers:
                key = answer.key.text
                for mailbox in self._owners.pop(key, ()):
                    mailbox.put(key, answer)
            self._news.notify_all()
