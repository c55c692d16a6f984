"""How much memory a worker's KV pages may take where the user does not say.

Owns the rule.  Reads what the system and its control group report; does not know models.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["available_memory", "default_kv_memory"]

KV_SHARE = 4
"""KV pages take one part in so many of the free memory; weights, prompts and the runner need the rest."""

_GROUP = Path("/sys/fs/cgroup")
_SYSTEM = Path("/proc/meminfo")


def available_memory(group: Path = _GROUP, system: Path = _SYSTEM) -> int:
    """Bytes that can be had: the system's, or what the control group leaves if that is less.

    File pages that the kernel gives back on demand count as free on both sides (`MemAvailable`, `inactive_file`).
    """
    kibibytes = _field(system, "MemAvailable:")
    unused = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = unused if kibibytes is None else kibibytes << 10
    limit, used = (_number(group / name) for name in ("memory.max", "memory.current"))
    if limit is None or used is None:
        return free
    reclaimable = _field(group / "memory.stat", "inactive_file") or 0
    return max(0, min(free, limit - used + reclaimable))


def _field(path: Path, name: str) -> int | None:
    """The number after a name in a file of names and numbers; None where there is none."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    found = (line.split() for line in lines)
    return next((int(words[1]) for words in found if words[:1] == [name] and words[1:2] and words[1].isdigit()), None)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def default_kv_memory(processes: int, available: int | None = None) -> int:
    """Bytes of KV pages for one of `processes` workers of this machine, each with its own engine."""
    free = available_memory() if available is None else available
    return max(1, free // KV_SHARE // processes)
