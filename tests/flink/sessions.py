"""Processes that end with whoever started them, however that ends.

Owns a keeper: a process that is told the session of each process started here.  Once it reads the end of its input,
because it was closed or because this process is gone, it kills every process of those sessions, children's children
too, in whatever process group they are.  Linux only: it reads /proc.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

__all__ = ["Sessions", "processes_of", "wait_gone"]

END_SECONDS = 30.0


@dataclass(frozen=True)
class Running:
    """One process as /proc shows it.  `session` is the id of the process that began its session."""

    pid: int
    parent: int
    session: int
    command: str


def running() -> Iterator[Running]:
    """Every process that is no zombie."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent, _, session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if state != "Z":
                yield Running(int(entry.name), int(parent), int(session), command)


def processes_of(session: int, words: str = "") -> list[int]:
    """Ids of the living processes of a session whose command line holds `words`."""
    return sorted(one.pid for one in running() if one.session == session and words in one.command)


def wait_gone(pids: Sequence[int], timeout: float) -> list[int]:
    """Wait until none of them lives; returns those that still do."""
    end = time.monotonic() + timeout
    while (left := [one.pid for one in running() if one.pid in pids]) and time.monotonic() < end:
        time.sleep(0.1)
    return left


class Sessions:
    """Starts processes, each in a session of its own; ends them all when it is left."""

    def __enter__(self) -> Self:
        self._keeper = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE, text=True,
                                        start_new_session=True, cwd=Path(__file__).parents[2])
        self._started: list[subprocess.Popen[bytes]] = []
        return self

    def __exit__(self, *exception: object) -> None:
        self._keeper.communicate(timeout=END_SECONDS)
        for process in self._started:
            process.wait(timeout=END_SECONDS)

    def start(self, command: Sequence[str], *, folder: Path, log: Path,
              environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a process with `folder` as its working folder; all it says goes to `log`.  Its pid is its session."""
        assert self._keeper.stdin is not None
        folder.mkdir(parents=True, exist_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
                                       env={**os.environ, **environment}, start_new_session=True)
        self._started.append(process)
        self._keeper.stdin.write(f"{process.pid}\n")
        self._keeper.stdin.flush()
        return process


def _keep() -> None:
    """The keeper's life.  A signal to its starter is none to it: it is in a session of its own."""
    sessions = {int(line) for line in sys.stdin}
    end = time.monotonic() + END_SECONDS
    while (left := [one.pid for one in running() if one.session in sessions]) and time.monotonic() < end:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


if __name__ == "__main__":
    _keep()
