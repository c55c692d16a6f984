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


def available_memory(group: Path = _GROUP) -> int:
    """Free bytes: the system's, or what the control group leaves if that is less."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, used = (_number(group / name) for name in ("memory.max", "memory.current"))
    return free if limit is None or used is None else max(0, min(free, limit - used))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def default_kv_memory(processes: int, available: int | None = None) -> int:
    """Bytes of KV pages for one of `processes` workers of this machine, each with its own engine."""
    free = available_memory() if available is None else available
    return max(1, free // KV_SHARE // processes)
