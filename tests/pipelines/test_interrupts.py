"""Laws of an interrupt beyond the exit code: who is told of it."""

from __future__ import annotations

import subprocess
import sys

_COMMAND = """
import os, signal, subprocess
from batchgen_beam.pipelines.interrupts import Interrupts

def child(**environment):
    return subprocess.Popen(["sleep", "60"], env={**os.environ, **environment})

server, worker = child(), child(CONTROL_API_SERVICE_DESCRIPTOR="url: ''")
try:
    with Interrupts():
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
except KeyboardInterrupt:
    print(worker.wait(30), server.poll())
server.kill()
"""


def test_an_interrupt_is_told_to_workers_only() -> None:
    """Workers have to save their rows; a job server below the command is needed to cancel the job."""
    run = subprocess.run([sys.executable, "-c", _COMMAND], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "-15 None\n", run.stderr
