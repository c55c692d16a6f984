"""The limit under which engines larger than their memory are compared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.memory_limit import memory_group

LIMIT = 256 << 20
TAKE = "import sys; taken = bytearray(int(sys.argv[1])); taken[::4096] = b'x' * len(taken[::4096]); print(len(taken))"


def test_a_process_in_a_group_gets_no_more() -> None:
    """Half of the limit is to be had, twice as much ends the process, and no group is left behind."""
    for size, ends_well in ((LIMIT // 2, True), (2 * LIMIT, False)):
        with memory_group(LIMIT) as group:
            if group is None:
                pytest.skip("no control group can be made on this machine")
            done = subprocess.run([sys.executable, "-c", TAKE, str(size)], capture_output=True, check=False,
                                  preexec_fn=group.enter)
            assert (done.returncode == 0) is ends_well
            peak = group.peak()
            assert peak is None or peak >= LIMIT // 2
    with memory_group(LIMIT) as again:
        assert again is not None


def test_a_group_gets_no_swap_beside_its_memory() -> None:
    """Where the kernel counts swap: what is swapped counts as memory, or nothing may be."""
    with memory_group(LIMIT) as group:
        if group is None:
            pytest.skip("no control group can be made on this machine")
        name = f"offload-{os.getpid()}"
        knobs = {Path("/sys/fs/cgroup/memory", name, "memory.memsw.limit_in_bytes"): LIMIT,
                 Path("/sys/fs/cgroup", name, "memory.swap.max"): 0}
        found = {path: int(path.read_text()) for path in knobs if path.exists()}
        if not found:
            pytest.skip("this kernel counts no swap")
        assert found == {path: knobs[path] for path in found}
