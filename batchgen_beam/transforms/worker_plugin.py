"""Termination signals of a Beam SDK worker: rows under way are left behind before the process ends.

A Beam plugin: workers import it in their main thread before they work, and a process may set handlers nowhere else.
Without it the signal of a spot notice, or of a cluster that takes a worker away, ends the process at once.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from typing import NoReturn

from batchgen_beam.transforms.leaving import HOLDERS

__all__ = ["PLUGIN", "install"]

LOG = logging.getLogger(__name__)

PLUGIN = __name__
"""What `--beam_plugins` calls it."""

_SIGNAL_EXIT = 128


def install() -> None:
    """Handle SIGTERM and SIGINT, where this is the main thread."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _leave)


def _leave(number: int, frame: object) -> NoReturn:
    try:
        HOLDERS.suspend_all()
    except (OSError, RuntimeError):
        LOG.exception("rows under way could not be left behind; they are computed again")
    finally:
        os._exit(_SIGNAL_EXIT + number)


if os.environ.get("CONTROL_API_SERVICE_DESCRIPTOR"):  # set in SDK workers only
    install()
