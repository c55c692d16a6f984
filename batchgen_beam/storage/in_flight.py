"""Who is in an engine now: one small file for each process, so that rows which kill their process are found.

Owns the format, when a process counts as dead, and how the attempts of several dead ones add up.  Does not know what
is done about a row that keeps killing.  A file is written before its rows enter the engine and removed at a clean end;
what is left of a dead process is one attempt of each of its rows.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchgen_beam.storage.files import join, list_stored, read_bytes, remove, write_atomically
from batchgen_beam.storage.journal import Journal, run_of
from batchgen_beam.storage.store_errors import store_errors

__all__ = ["REFRESH_SECONDS", "SILENT_SECONDS", "Attempt", "InFlightFile", "combined", "dead_attempts",
           "remove_in_flight"]

REFRESH_SECONDS = 60.0
SILENT_SECONDS = 300.0
"""A process of another host is dead when its file says nothing new for so long."""

_VERSION = 1
_PREFIX = "in-flight-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What a row has been through: processes that died with it since it had generated `length` tokens.

    `alone`: whether it runs (or died) with no other row in the process.
    """

    attempts: int = 0
    alone: bool = False
    length: int = 0


@dataclass(frozen=True, slots=True)
class _Process:
    """A process that can be told from all others.  Where `host` is equal, `pid` means the same; empty: not known."""

    host: str
    pid: int
    started: str


def _this_process() -> _Process:
    """The host is a boot of a kernel and a process namespace of it: containers count their processes by themselves."""
    pid = os.getpid()
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        host = f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # a system without them
        return _Process("", pid, "")
    return _Process(host, pid, _started(pid) or "")


def _started(pid: int) -> str | None:
    """When a process of this host began, in ticks of its kernel; None where it does not live (proc(5))."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return None if state in "ZX" else fields[18]


class InFlightFile:
    """The file of one process, which is this one.  `clock` gives seconds since the epoch."""

    def __init__(self, journal: Journal, run: str, process: str, *, clock: Callable[[], float] = time.time) -> None:
        self._path = join(journal.run_folder(run), f"{_PREFIX}{process}.json")
        self._clock = clock
        self._process = _this_process()
        self._rows: Mapping[str, Attempt] = {}
        self._lines: dict[str, str] = {}
        self._written: float | None = None

    def write(self, rows: Mapping[str, Attempt]) -> None:
        """Say which rows (by key text) are in the engine, with what was known about them when they entered.

        An `Attempt` that was told before is not put into words again.  Tried once: the engine waits for it, and it
        matters only if the process dies.
        """
        now = self._clock()
        lines = {text: self._lines[text] if self._rows.get(text) is row else _line(text, row)
                 for text, row in rows.items()}
        self._rows, self._lines = dict(rows), lines
        facts = json.dumps({"version": _VERSION, "process": asdict(self._process), "written": now})
        write_atomically(self._path, f'{facts[:-1]}, "rows": {{{", ".join(lines.values())}}}}}'.encode(), pauses=())
        self._written = now

    def refresh(self) -> None:
        """Say it again if it was last said `REFRESH_SECONDS` ago, so that other hosts see that the process lives."""
        if self._written is not None and self._clock() - self._written >= REFRESH_SECONDS:
            self.write(self._rows)

    def remove(self) -> None:
        """The engine has no row any more."""
        self._written = None
        remove(self._path)


def _line(text: str, row: Attempt) -> str:
    return f"{json.dumps(text)}: {json.dumps([row.attempts, row.alone, row.length])}"


def dead_attempts(journal: Journal, *, now: float, run: str | None = None) -> dict[str, Attempt]:
    """Key text -> what dead processes, of one run or of all, have done to the row; `now` in seconds since the epoch.

    Files that are torn, gone or of another release count as nothing.
    """
    here = _this_process()
    found = (_read(path) for path in _files(journal) if run in (None, run_of(path)))
    return combined(rows for process, written, rows in filter(None, found) if _is_dead(process, written, here, now))


def combined(dead: Iterable[Mapping[str, Attempt]]) -> dict[str, Attempt]:
    """The files of dead processes as one: only those count that saw a row at its greatest length.

    Each is one more attempt than it knew of; several that knew of none of each other are as many attempts.
    """
    by_row: dict[str, list[Attempt]] = defaultdict(list)
    for rows in dead:
        for text, row in rows.items():
            by_row[text].append(row)
    return {text: _combined_row(found) for text, found in by_row.items()}


def _combined_row(found: list[Attempt]) -> Attempt:
    length = max(row.length for row in found)
    last = [row for row in found if row.length == length]
    attempts = max(len(last), 1 + max(row.attempts for row in last))
    return Attempt(attempts=attempts, alone=any(row.alone for row in last), length=length)


def _is_dead(process: _Process, written: float, here: _Process, now: float) -> bool:
    if here.host and process.host == here.host:
        return _started(process.pid) != process.started
    return now - written > SILENT_SECONDS


def _read(path: str) -> tuple[_Process, float, dict[str, Attempt]] | None:
    try:
        facts: dict[str, Any] = json.loads(read_bytes(path))
        if facts["version"] != _VERSION:
            return None
        rows = {text: Attempt(attempts=int(attempts), alone=bool(alone), length=int(length))
                for text, (attempts, alone, length) in facts["rows"].items()}
        return _Process(**facts["process"]), float(facts["written"]), rows
    except store_errors():
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def remove_in_flight(journal: Journal, runs: Iterable[str]) -> int:
    """Delete the files of runs that have ended; how many there were."""
    ended = set(runs)
    return sum(remove(path) for path in _files(journal) if run_of(path) in ended)


def _files(journal: Journal) -> list[str]:
    return [file.uri for file in list_stored(journal.folder, f"run=*/{_PREFIX}*.json")]
