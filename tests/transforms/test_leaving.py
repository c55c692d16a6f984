"""What happens to rows when their process has to go."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from batchgen_beam.transforms.leaving import Holders
from batchgen_beam.transforms.worker_plugin import PLUGIN

_WORKER = """
import importlib, os, signal, sys, threading, time
from batchgen_beam.transforms.leaving import HOLDERS

class Rows:
    def suspend(self):
        assert HOLDERS.suspending
        if sys.argv[2] == "fails":
            raise OSError("no space left")
        print("saved", flush=True)

rows = Rows()
HOLDERS.enter(rows)
importlib.import_module(sys.argv[1])
threading.Timer(0.2, os.kill, (os.getpid(), int(sys.argv[3]))).start()
time.sleep(30)
"""


class _Holder:
    def __init__(self, error: Exception | None = None) -> None:
        self.asked = 0
        self._error = error

    def suspend(self) -> None:
        """Count, then fail where asked to."""
        self.asked += 1
        if self._error is not None:
            raise self._error


def test_every_living_holder_is_asked_and_the_first_error_is_told() -> None:
    """All holders are asked though one fails; those that are gone are not kept alive."""
    holders = Holders()
    good, bad, gone = _Holder(), _Holder(OSError("disk full")), _Holder()
    for holder in (good, bad, gone):
        holders.enter(holder)
    del holder, gone
    gc.collect()
    with pytest.raises(OSError, match="disk full"):
        holders.suspend_all()
    assert (good.asked, bad.asked) == (1, 1)
    assert not holders.suspending


@pytest.mark.parametrize("number", [15, 2])
@pytest.mark.parametrize("way", ["works", "fails"])
def test_a_worker_saves_its_rows_when_it_is_ended(number: int, way: str) -> None:
    """An SDK worker that gets SIGTERM or SIGINT leaves its rows behind and ends with the signal's code, or says why."""
    run = subprocess.run([sys.executable, "-c", _WORKER, PLUGIN, way, str(number)], capture_output=True, text=True,
                         timeout=60, check=False, env={**os.environ, "CONTROL_API_SERVICE_DESCRIPTOR": "url: ''"})
    assert run.returncode == 128 + number, run.stderr
    assert run.stdout == ("saved\n" if way == "works" else "")
    assert ("no space left" in run.stderr) is (way == "fails")


def test_no_other_process_gets_handlers() -> None:
    """The plugin changes nothing where it is imported outside an SDK worker."""
    code = f"import signal, {PLUGIN}; print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)"
    environment = {name: value for name, value in os.environ.items() if name != "CONTROL_API_SERVICE_DESCRIPTOR"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True,
                         env=environment)
    assert run.stdout == "True\n"
