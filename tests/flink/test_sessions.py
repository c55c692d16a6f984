"""Laws of the processes that tests start: none is left, whatever becomes of the test."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flink.cluster import ROOT
from tests.flink.rest import wait_for
from tests.flink.sessions import Sessions, processes_of, wait_gone

FAMILY = "sleep 1000 & set -m; sleep 1000 & wait"
"""A shell with two children, one of them in a process group of its own."""

STARTER = f"""
import sys, time
from pathlib import Path
from tests.flink.sessions import Sessions
with Sessions() as sessions:
    folder = Path(sys.argv[1])
    started = sessions.start(["bash", "-c", {FAMILY!r}], folder=folder, log=folder / "log", environment={{}})
    print(started.pid, flush=True)
    time.sleep(1000)
"""


def family(session: int) -> list[int]:
    """The shell and its children, once all are there."""
    return wait_for("the family", lambda: found if len(found := processes_of(session)) == 3 else None, 30)


def test_all_descendants_end_with_their_block(tmp_path: Path) -> None:
    """Also those that left their parent's process group."""
    with Sessions() as sessions:
        started = sessions.start(["bash", "-c", FAMILY], folder=tmp_path, log=tmp_path / "log", environment={})
        pids = family(started.pid)
    assert wait_gone(pids, 30) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
def test_all_descendants_end_with_a_starter_that_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    """Nobody is left to clean up; the keeper notices."""
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE,
                               text=True)
    assert starter.stdout is not None
    pids = family(int(starter.stdout.readline()))
    starter.send_signal(how)
    starter.communicate(timeout=30)
    assert wait_gone(pids, 30) == []
