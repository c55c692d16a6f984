"""Ctrl-C and termination signals of one command.

Owns the signal handlers, and the way out where a runner does not end: Beam waits without limit for worker processes
that it was starting.  Does not know what the command does.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Self

from batchgen_beam.transforms.leaving import HOLDERS

__all__ = ["INTERRUPTED", "INTERRUPTED_MESSAGE", "Interrupts"]

INTERRUPTED = 130
INTERRUPTED_MESSAGE = (
    "batchgen-beam: interrupted; answers and rows under way are kept, the same command goes on from there\n")

STDERR = 2

GRACE_SECONDS = 8.0
"""So long the command may take to end by itself; then its processes are ended, unless they still save rows."""

LONGEST_SECONDS = 16.0
"""So long rows may take to be saved: whoever sends a termination signal will soon send the other one."""

_LOOK_SECONDS = 0.2

_WORKER_MARK = b"CONTROL_API_SERVICE_DESCRIPTOR="
"""In the environment of Beam's worker processes, and of no other."""


class Interrupts:
    """While it is open, Ctrl-C and a termination signal both interrupt the main thread, and are remembered.

    A local runner works in the main thread and reports the interrupt as the failure of some step, or not at all.
    Worker processes are told at once; others below this one go on, such as a job server, through which the job is
    cancelled.  A second signal ends them all and this process without waiting; so does the time.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.seen = False

    def __enter__(self) -> Self:
        self._silenced = logging.root.manager.disable
        self._over = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name="batchgen-watchdog", daemon=True)
        self._before = {number: signal.signal(number, self._interrupt) for number in self.SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        logging.disable(self._silenced)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: object) -> NoReturn:
        if self.seen:
            _leave()
        self.seen = True
        logging.disable()
        _signal(_workers(), signal.SIGTERM)
        self._watchdog.start()
        raise KeyboardInterrupt

    def _watch(self) -> None:
        began = time.monotonic()
        while not self._over.wait(_LOOK_SECONDS):
            waited = time.monotonic() - began
            saving = HOLDERS.suspending or _workers()
            if waited >= LONGEST_SECONDS or (waited >= GRACE_SECONDS and not saving):
                _leave()


def _leave() -> NoReturn:
    """End all processes below this one, then this one, without waiting for any thread."""
    _signal(_below(os.getpid()), signal.SIGKILL)
    os.write(STDERR, INTERRUPTED_MESSAGE.encode())
    os._exit(INTERRUPTED)


def _signal(processes: Iterable[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _workers() -> list[int]:
    """Ids of the worker processes below this one."""
    return [process for process in _below(os.getpid()) if _is_worker(process)]


def _is_worker(process: int) -> bool:
    try:
        return _WORKER_MARK in Path(f"/proc/{process}/environ").read_bytes()
    except OSError:  # it has ended
        return False


def _below(process: int) -> list[int]:
    """Ids of the children of a process and of theirs."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            after_name = entry.read_text().rpartition(")")[2].split()
            children.setdefault(int(after_name[1]), []).append(int(entry.parent.name))
    found = [process]
    for parent in found:  # grows while it is read
        found += children.get(parent, [])
    return found[1:]
