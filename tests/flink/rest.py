"""Flink's REST interface, as far as the tests need it.

Owns the requests and their time-outs.  Does not know who runs the cluster.
"""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.error import URLError

__all__ = ["FlinkRest", "TaskManager", "wait_for"]

REQUEST_SECONDS = 20.0
ENDED = frozenset({"FINISHED", "FAILED", "CANCELED"})

T = TypeVar("T")


def wait_for(what: str, look: Callable[[], T | None], timeout: float, *, every: float = 0.2) -> T:
    """What `look` gives once it gives something true; a `TimeoutError` says what did not come."""
    end = time.monotonic() + timeout
    while not (found := look()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {timeout:.0f} s")
        time.sleep(every)
    return found


@dataclass(frozen=True)
class TaskManager:
    """A registered TaskManager.  `name` is its resource id."""

    name: str
    slots: int
    free: int


class FlinkRest:
    """A cluster by its REST address."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str, *, method: str = "GET") -> Any:
        """The answer to one request; an `URLError` where there is no cluster."""
        request = urllib.request.Request(f"http://{self.address}{path}", method=method)
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def task_managers(self) -> list[TaskManager]:
        """Those that are registered, none while the cluster does not answer."""
        try:
            found = self.get("/taskmanagers")["taskmanagers"]
        except (URLError, ConnectionError):
            return []
        return [TaskManager(one["id"], one["slotsNumber"], one["freeSlots"]) for one in found]

    def jobs(self) -> dict[str, str]:
        """The state of every job by its id."""
        return {one["id"]: one["status"] for one in self.get("/jobs")["jobs"]}

    def unfinished(self) -> list[str]:
        """Ids of jobs that hold slots or wait for them."""
        return [job for job, state in self.jobs().items() if state not in ENDED]

    def cancel(self, job: str, *, timeout: float = 120.0) -> str:
        """Stop a job that nobody waits for: without its client it keeps its slots.  Returns its last state."""
        self.get(f"/jobs/{job}?mode=cancel", method="PATCH")
        return self.ended(job, timeout=timeout)

    def ended(self, job: str, *, timeout: float) -> str:
        """Wait until the job has ended; returns its last state."""
        wait_for(f"end of Flink job {job}", lambda: self.jobs()[job] in ENDED, timeout)
        return self.jobs()[job]

    def exceptions(self, job: str) -> list[str]:
        """The first line of every failure that the job has met, newest first."""
        found = self.get(f"/jobs/{job}/exceptions")["exceptionHistory"]["entries"]
        return [entry["stacktrace"].splitlines()[0] for entry in found]
