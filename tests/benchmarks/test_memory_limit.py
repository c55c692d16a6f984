"""The limit under which engines larger than their memory are compared."""

from __future__ import annotations

import subprocess
import sys

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
