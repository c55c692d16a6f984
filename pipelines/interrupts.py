"""Ctrl-C and termination signals of one command.

Owns the signal handlers, and the way out where a runner does not end: Beam waits without limit for worker processes
that it was starting.  Does not know what the command does.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Self

__all__ = ["INTERRUPTED", "INTERRUPTED_MESSAGE", "Interrupts"]

INTERRUPTED = 130
INTERRUPTED_MESSAGE = (
    "batchgen-beam: interrupted; what was published stays, the same command runs the job again\n")

STDERR = 2

GRACE_SECONDS = 8.0
"""So long the command may take to end by itself; then its processes are ended."""


class Interrupts:
    """While it is open, Ctrl-C and a termination signal both interrupt the main thread, and are remembered.

    A local runner works in the main thread and reports the interrupt as the failure of some step, or not at all.  A
    second signal, or `GRACE_SECONDS` after the first, end child processes and this one at once.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.seen = False

    def __enter__(self) -> Self:
        self._silenced = logging.root.manager.disable
        self._watchdog = threading.Timer(GRACE_SECONDS, _leave)
        self._watchdog.daemon = True
        self._before = {number: signal.signal(number, self._interrupt) for number in self.SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        self._watchdog.cancel()
        logging.disable(self._silenced)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: object) -> NoReturn:
        if self.seen:
            _leave()
        self.seen = True
        logging.disable()
        self._watchdog.start()
        raise KeyboardInterrupt


def _leave() -> NoReturn:
    """End all processes below this one, then this one, without waiting for any thread."""
    for child in _below(os.getpid()):
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    os.write(STDERR, INTERRUPTED_MESSAGE.encode())
    os._exit(INTERRUPTED)


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
