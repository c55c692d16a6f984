"""What a process tree and the rest of the machine use, seen from /proc.

Busy time of the machine includes interrupts and stolen time; time of ended children counts once their parent has waited
for them.  Memory is the sum of resident sizes, so pages that processes share count once for each.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Sample", "Usage", "sample", "tree", "usage"]

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look at the machine: monotonic seconds, CPU seconds so far, resident bytes of the tree."""

    at: float
    own: float
    watcher: float
    busy: float
    resident: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """CPU seconds within a window: of the tree, and of all else but the watching process itself."""

    own: float
    others: float
    share: float
    """`others` over all that the watched cores had to give."""


def tree(pid: int) -> list[int]:
    """The process and all its descendants that are alive."""
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        for file in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            try:
                waiting += [int(child) for child in file.read_text().split()]
            except OSError:
                continue
    return found


def _used(pid: int, *, children: bool = True) -> tuple[float, int]:
    """CPU seconds of a process, with those of children it has waited for, and resident bytes; zeros when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0, 0
    return sum(int(ticks) for ticks in fields[11:15 if children else 13]) / _TICKS, int(fields[21]) * _PAGE


def _busy() -> float:
    with Path("/proc/stat").open() as lines:
        user, nice, system, _, _, irq, softirq, steal = (int(ticks) for ticks in lines.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICKS


def sample(pid: int) -> Sample:
    """The machine and the tree of `pid` now."""
    parts = [_used(member) for member in tree(pid)]
    return Sample(at=time.monotonic(), own=sum(part[0] for part in parts),
                  watcher=_used(os.getpid(), children=False)[0], busy=_busy(), resident=sum(part[1] for part in parts))


def _at(samples: Sequence[Sample], moment: float, value: Callable[[Sample], float]) -> float:
    """A value between two samples, on the straight line between them."""
    right = bisect_left([sample.at for sample in samples], moment)
    if right == 0 or right == len(samples):
        return value(samples[min(right, len(samples) - 1)])
    before, after = samples[right - 1], samples[right]
    part = (moment - before.at) / (after.at - before.at)
    return value(before) + part * (value(after) - value(before))


def usage(samples: Sequence[Sample], start: float, end: float, cores: int) -> Usage:
    """What was used from `start` to `end` (monotonic seconds) on a machine of `cores` cores."""
    def spent(value: Callable[[Sample], float]) -> float:
        return _at(samples, end, value) - _at(samples, start, value)

    own = spent(lambda sample: sample.own)
    others = max(0.0, spent(lambda sample: sample.busy) - own - spent(lambda sample: sample.watcher))
    return Usage(own=own, others=others, share=others / (cores * max(end - start, 1e-9)))
