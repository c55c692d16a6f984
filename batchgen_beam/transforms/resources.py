"""What a worker may take of its machine where the user does not say: cores, and memory for KV pages.

Owns the rules.  Reads what the system and the process's control groups (version 1 or 2) report; does not know models.
A process is bound by its own control group and by all that this one lies in.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_cores", "available_memory", "default_kv_memory"]

KV_SHARE = 4
"""KV pages take one part in so many of the free memory; weights, prompts and the runner need the rest."""

_GROUP = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_SYSTEM = Path("/proc/meminfo")

_MEMORY_FILES = (("memory.max", "memory.current", "inactive_file"),
                 ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
"""Limit, use, and the field of `memory.stat` that is given back on demand; version 2 and version 1."""


def available_cores(group: Path = _GROUP, own: Path = _OWN) -> int:
    """Cores that this process can keep busy: those it may run on, or the CPU time that its control groups grant (quota
    by period, rounded up) if that is less."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    granted = (_granted_cores(folder) for folder in _groups("cpu", group, own))
    return min([allowed, *(cores for cores in granted if cores is not None)])


def _granted_cores(folder: Path) -> int | None:
    """Of one control group; None where it sets no limit."""
    words = _words(folder / "cpu.max") or _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
    try:
        quota, period = map(int, words)
    except ValueError:
        return None
    return -(-quota // period) if quota > 0 and period > 0 else None


def available_memory(group: Path = _GROUP, system: Path = _SYSTEM, own: Path = _OWN) -> int:
    """Bytes that can be had: the system's, or what the control groups leave if that is less.

    File pages that the kernel gives back on demand count as free on both sides (`MemAvailable`, `inactive_file`).
    """
    kibibytes = _field(system, "MemAvailable:")
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if kibibytes is None else kibibytes << 10
    left = (_left_memory(folder, *names) for folder in _groups("memory", group, own) for names in _MEMORY_FILES)
    return max(0, min([free, *(size for size in left if size is not None)]))


def _left_memory(folder: Path, limit_name: str, used_name: str, reclaimable_name: str) -> int | None:
    """Of one control group; None where it sets no limit."""
    try:
        (limit,), (used,) = (map(int, _words(folder / name)) for name in (limit_name, used_name))
    except ValueError:
        return None
    return limit - used + (_field(folder / "memory.stat", reclaimable_name) or 0)


def _groups(controller: str, group: Path, own: Path) -> Iterator[Path]:
    """Folders that may hold a controller's limits: of the process's control group, and of those that it lies in.

    A container often sees its own group as the topmost one and is told the host's name for it: what is not there has
    no limits to read.
    """
    for line in _lines(own):
        _, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        top = group / controllers
        inner = Path(name.strip("/"))
        folder = top if ".." in inner.parts else top / inner
        yield from (folder, *folder.parents[: len(folder.parts) - len(top.parts)])
    yield from (group, group / controller)


def _field(path: Path, name: str) -> int | None:
    """The number after a name in a file of names and numbers; None where there is none."""
    found = (line.split() for line in _lines(path))
    return next((int(words[1]) for words in found if words[:1] == [name] and words[1:2] and words[1].isdigit()), None)


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path) for word in line.split()]


def _lines(path: Path) -> list[str]:
    """Of a file that can be read; else none."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def default_kv_memory(processes: int, available: int | None = None) -> int:
    """Bytes of KV pages for one of `processes` workers of this machine, each with its own engine."""
    free = available_memory() if available is None else available
    return max(1, free // KV_SHARE // processes)
