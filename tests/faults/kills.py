"""SIGKILL at observed events: when a command is killed, whether that is what was meant, and a plan of many kills.

Owns the kinds of kills and how many there are of each, and the sequences of kills that one output folder goes through
before the same command may end.  Does not know what is published.

A command is stopped first (SIGSTOP), so that what was observed can be verified while nothing moves; if it no longer
holds, the command goes on and the next event of the kind is waited for.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path

from batchgen_beam.records import Failure, Outcome
from batchgen_beam.storage.journal import JOURNAL_FOLDER, Journal
from tests.faults.events import (
    Change,
    Event,
    FolderWatch,
    is_part,
    is_report,
    is_temporary,
    is_unit,
)
from tests.faults.job import Job

__all__ = ["Kill", "KillPool", "Kind", "answered_rows", "kill_at", "plan_kills", "run_names"]

LONGEST_SECONDS = 240.0
"""So long a command may take until it is killed or has ended, on a machine that does other things too."""


STEP_SECONDS = 0.0003
"""So long a command runs at once where what is waited for passes quickly."""


class Kind(IntEnum):
    """What a command is doing when it is killed, in the order in which it does it."""

    GENERATING = 0
    RENAMING_PART = 1
    RENAMING_UNIT = 2
    PUBLISHING = 3
    COMPACTING = 4


class Compaction(Enum):
    """How far the merging of parts is: a merged one is there, the old ones are gone."""

    NOT_BEGUN = 0
    UNDER_WAY = 1
    DONE = 2


@dataclass(frozen=True, slots=True)
class Kill:
    """The `count`-th event that `matches`.  `count` 0: the one that leaves no unit unpublished."""

    kind: Kind
    name: str
    matches: Callable[[str], bool]
    count: int = 1

    @property
    def change(self) -> Change:
        """What happens to the file that is watched for: a temporary one is created, another gets its name."""
        temporary = self.kind in (Kind.RENAMING_PART, Kind.RENAMING_UNIT)
        return Change.CREATED if temporary else Change.APPEARED


def _temporary_part(path: str) -> bool:
    return is_temporary(path) and path.startswith(JOURNAL_FOLDER)


def _temporary_unit(path: str) -> bool:
    return is_temporary(path) and not path.startswith(JOURNAL_FOLDER)


def _success(path: str) -> bool:
    return path == "_SUCCESS"


def plan_kills(count: int, units: int, seed: int) -> list[Kill]:
    """So many kills in a random order, a fifth in publishing, a twentieth each in compaction and before a rename."""
    draw = random.Random(seed)
    publishing, compacting, renaming = -(-count // 5), -(-count // 18), -(-count // 18)
    kills = [_publishing(index, units, draw) for index in range(publishing)]
    kills += [Kill(Kind.COMPACTING, "merged part there", _success)] * compacting
    kills += [Kill(Kind.RENAMING_UNIT, "temporary unit", _temporary_unit, draw.randint(1, 3)) if index % 3 == 2 else
              Kill(Kind.RENAMING_PART, "temporary part", _temporary_part, draw.randint(2, 3))
              for index in range(renaming)]
    for _ in range(count - len(kills)):
        number = draw.choice((1, 1, 2, 2, 3))
        kills.append(Kill(Kind.GENERATING, f"part {number}", is_part, number))
    draw.shuffle(kills)
    return kills


def _publishing(index: int, units: int, draw: random.Random) -> Kill:
    number = draw.randint(2, units - 1)
    return (Kill(Kind.PUBLISHING, "first unit", is_unit), Kill(Kind.PUBLISHING, f"unit {number}", is_unit, number),
            Kill(Kind.PUBLISHING, "last unit", is_unit, 0),
            Kill(Kind.PUBLISHING, "before _SUCCESS", is_report))[index % 4]


class KillPool:
    """Kills that are still to be done, for several threads."""

    def __init__(self, kills: Iterable[Kill]) -> None:
        self._lock = threading.Lock()
        self._left: dict[Kind, deque[Kill]] = {kind: deque() for kind in Kind}
        self.done: list[Kill] = []
        for kill in kills:
            self._left[kill.kind].append(kill)

    def sequence(self) -> list[Kill]:
        """Kills for one output folder, in the order in which a job comes to them; none when all are done.

        A run that is to be killed in its compaction must have written parts, and a report: nothing kills it before.
        """
        with self._lock:
            if self._left[Kind.COMPACTING]:
                limits = {Kind.GENERATING: 2, Kind.COMPACTING: 2}
            else:
                limits = {Kind.RENAMING_PART: 1, Kind.GENERATING: 6, Kind.RENAMING_UNIT: 1, Kind.PUBLISHING: 3}
            return [self._left[kind].popleft() for kind, most in limits.items()
                    for _ in range(min(most, len(self._left[kind])))]

    def put_back(self, kills: Iterable[Kill]) -> None:
        """These were not done."""
        with self._lock:
            for kill in kills:
                self._left[kill.kind].append(kill)

    def record(self, kill: Kill) -> None:
        """This one was done."""
        with self._lock:
            self.done.append(kill)

    def histogram(self) -> dict[str, int]:
        """How many kills were done of each kind and name."""
        counts = Counter((kill.kind, kill.name) for kill in self.done)
        return {f"{kind.name.lower().replace('_', ' ')}: {name}": counts[kind, name] for kind, name in sorted(counts)}


def kill_at(job: Job, output: Path, kills: Sequence[Kill]) -> tuple[Kill | None, list[Kill]]:
    """Start the command and kill it at the first of `kills` that comes; gives it, and those that were missed before it.

    None: the command has ended by itself, all were missed.
    """
    aims, missed, seen = deque(kills), [], Counter[Kill]()
    output.mkdir(parents=True, exist_ok=True)
    with FolderWatch(output) as watch:
        process = job.start(output)
        try:
            while aims and process.poll() is None:
                for event in watch.events(0.2):
                    while aims and _is_past(aims[0], event):
                        missed.append(aims.popleft())
                    if aims and _is_met(aims[0], event, seen, job, output) and (
                            _killed(process, aims[0], event, job, output)):
                        return aims.popleft(), missed
            process.wait(LONGEST_SECONDS)
        finally:
            _end(process)
    return None, [*missed, *aims]


def _is_past(kill: Kill, event: Event) -> bool:
    """Whether the event shows that the command does something later now."""
    if kill.kind <= Kind.RENAMING_PART:
        return is_unit(event.path)
    return kill.kind <= Kind.PUBLISHING and event.path == "_SUCCESS" and event.appeared()


def _is_met(kill: Kill, event: Event, seen: Counter[Kill], job: Job, output: Path) -> bool:
    if event.change is not kill.change or not kill.matches(event.path):
        return False
    seen[kill] += 1
    return seen[kill] >= kill.count if kill.count else published_units(output) == job.units


def _killed(process: subprocess.Popen[bytes], kill: Kill, event: Event, job: Job, output: Path) -> bool:
    """Stop the command and kill it if what was seen still holds, or will after some steps in slow motion."""
    with _punctual():
        while _stopped(process):
            if _holds(kill, event, job, output):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return True
            past = kill.kind is not Kind.COMPACTING or compaction(output) is Compaction.DONE
            os.killpg(process.pid, signal.SIGCONT)
            if past:
                return False
            time.sleep(STEP_SECONDS)
    return False


@contextmanager
def _punctual() -> Iterator[None]:
    """This thread comes before all others when its time is there, where the system permits it."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, *before)


def _stopped(process: subprocess.Popen[bytes]) -> bool:
    """Stop the command; False if it has ended."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGSTOP)
    state = os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    return state is not None and state.si_code == os.CLD_STOPPED


def _holds(kill: Kill, event: Event, job: Job, output: Path) -> bool:
    match kill.kind:
        case Kind.GENERATING:
            return answered_rows(output) < job.rows
        case Kind.RENAMING_PART:
            return (output / event.path).exists() and answered_rows(output) < job.rows
        case Kind.RENAMING_UNIT:
            return (output / event.path).exists()
        case Kind.PUBLISHING:
            return not (output / "_SUCCESS").exists()
        case Kind.COMPACTING:
            return compaction(output) is Compaction.UNDER_WAY


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def journal_of(output: Path) -> Journal | None:
    """The journal of the only content print of an output folder."""
    found = list((output / JOURNAL_FOLDER).glob("*"))
    return Journal(str(found[0])) if found else None


def answered_rows(output: Path) -> int:
    """Rows that have an answer in the journal."""
    journal = journal_of(output)
    if journal is None:
        return 0
    entries = (entry for part in journal.parts() for entry in journal.entries(part).entries)
    return len({entry.key for entry in entries if isinstance(entry, Outcome | Failure)})


def published_units(output: Path) -> int:
    """Units whose results stand."""
    return sum(1 for _ in (output / "results").rglob("rg-*.parquet"))


def compaction(output: Path) -> Compaction:
    """How far the compaction behind `_SUCCESS` is, by the parts of runs that have a report."""
    runs = {path.name.removesuffix(".json") for path in (output / "_runs").glob("*.json")}
    success = (output / "_SUCCESS").stat().st_mtime_ns
    parts = [path for path in (output / JOURNAL_FOLDER).glob("*/run=*/*.parquet")
             if path.parent.name.removeprefix("run=") in runs]
    old = [path for path in parts if path.stat().st_mtime_ns < success]
    if len(old) == len(parts):
        return Compaction.NOT_BEGUN
    return Compaction.UNDER_WAY if old else Compaction.DONE


def run_names(output: Path) -> list[str]:
    """The runs that have reported progress, in order."""
    return sorted(path.name for path in (output / "_progress").glob("*"))
