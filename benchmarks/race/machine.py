"""What the race runs on, in words."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["machine"]


def _field(path: str, name: str) -> str:
    lines = Path(path).read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "unknown")


def machine() -> dict[str, Any]:
    """Processor, its instructions for small floats, cores, memory, kernel, Python and today's date."""
    memory = int(_field("/proc/meminfo", "MemTotal").split()[0]) / (1 << 20)
    flags = _field("/proc/cpuinfo", "flags").split()
    return {"cpu": _field("/proc/cpuinfo", "model name"),
            "family": f"{_field('/proc/cpuinfo', 'cpu family')}/{_field('/proc/cpuinfo', 'model')}",
            "instructions": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
                             if flag in flags],
            "cores": os.cpu_count(), "memory_gib": round(memory),
            "kernel": platform.release(), "python": platform.python_version(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
