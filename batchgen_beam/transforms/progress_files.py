"""Progress files: each worker process overwrites one small JSON file, the launcher reads them all.

Owns their format and the thread that writes them.  Does not know who shows them.
A reader may meet a file that vanishes or is half written (object stores); it skips it and reads it next time.
"""

from __future__ import annotations

import json
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

from apache_beam.io.filesystem import BeamIOError

from batchgen_beam.storage import files

__all__ = ["ProgressSample", "ProgressWriter", "progress_folder", "read_samples", "total"]

LOG = logging.getLogger(__name__)


def progress_folder(output: str, run_id: str) -> str:
    """Where the processes of one run leave their samples."""
    return files.join(output, "_progress", run_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSample:
    """What one process has done so far.  `fill` is the mean share of the engine's rows in use, weighted by `steps`."""

    process: str
    elapsed_seconds: float = 0.0
    load_seconds: float = 0.0
    answered: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    active: int = 0
    capacity: int = 0
    queued: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    pages_used: int = 0
    pages_total: int = 0
    evictions: int = 0
    holds: int = 0
    steps: int = 0
    busy_seconds: float = 0.0
    fill: float = 0.0
    engines: int = 0
    deterministic: bool = True
    numeric_print: str = ""

    @property
    def failed_rows(self) -> int:
        """Failed rows of every code."""
        return sum(self.failed.values())

    def as_facts(self) -> dict[str, object]:
        """Values for a JSON file."""
        return asdict(self)


_SUMMED = ("load_seconds", "answered", "active", "capacity", "queued", "prompt_tokens", "generated_tokens",
           "recomputed_tokens", "pages_used", "pages_total", "evictions", "holds", "steps", "busy_seconds", "engines")


def total(samples: Iterable[ProgressSample]) -> ProgressSample:
    """All processes as one: sums, the mean fill over all steps, the longest time; deterministic only if all are."""
    parts = list(samples)
    failed: Counter[str] = Counter()
    for part in parts:
        failed.update(part.failed)
    sums = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
    return ProgressSample(
        process="all",
        elapsed_seconds=max((part.elapsed_seconds for part in parts), default=0.0),
        failed=dict(failed),
        fill=sum(part.fill * part.steps for part in parts) / max(sums["steps"], 1),
        deterministic=all(part.deterministic for part in parts),
        numeric_print=" ".join(sorted({part.numeric_print for part in parts if part.numeric_print})),
        **sums,
    )


def read_samples(folder: str) -> list[ProgressSample]:
    """The samples of every process of a run, none before the first was written."""
    found = map(_read_sample, files.list_files(files.join(folder, "*.json")))
    return [sample for sample in found if sample]


def _read_sample(path: str) -> ProgressSample | None:
    try:
        return ProgressSample(**json.loads(files.read_bytes(path)))
    except (BeamIOError, OSError, ValueError, TypeError):
        return None


class ProgressWriter:
    """A daemon thread that writes what `sample` says every `interval` seconds, for as long as its owner lives.

    `sample` is a bound method, held weakly: the thread keeps nothing alive.
    """

    def __init__(self, folder: str, name: str, sample: Callable[[], ProgressSample], interval: float) -> None:
        self._path = files.join(folder, f"{name}.json")
        self._sample = weakref.WeakMethod(sample)
        self._interval = interval
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="batchgen-progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            if not self.write():
                return

    def write(self) -> bool:
        """Write one sample now; False once the owner is gone.  A refusal is logged: progress is no result."""
        with self._lock:
            sample = self._sample()
            if sample is None:
                return False
            try:
                files.write_atomically(self._path, json.dumps(sample().as_facts()).encode())
            except (BeamIOError, OSError) as error:
                LOG.warning("progress file %s was not written: %s", self._path, error)
        return True

    def close(self) -> None:
        """End the thread; the last sample stays."""
        self._stop.set()
        self._thread.join()
