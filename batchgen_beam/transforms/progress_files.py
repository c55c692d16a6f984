"""Progress files: each worker process overwrites one small JSON file, the launcher reads them all.

Owns their format and the thread that writes them.  Does not know who shows them.
A reader may meet a file that vanishes or is half written (object stores); it counts it, and reads it next time.
"""

from __future__ import annotations

import json
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from batchgen_beam.engine.stats import EngineStats
from batchgen_beam.storage import files
from batchgen_beam.storage.store_errors import store_errors

__all__ = ["ProgressSample", "ProgressWriter", "Readings", "last_seen", "progress_folder", "read_samples", "total"]

LOG = logging.getLogger(__name__)

_FOLDER = "_progress"


def progress_folder(output: str, run_id: str) -> str:
    """Where the processes of one run leave their samples."""
    return files.join(output, _FOLDER, run_id)


def last_seen(output: str) -> dict[str, float]:
    """When each run last wrote a sample, in seconds since the epoch."""
    seen: dict[str, float] = {}
    for file in files.list_stored(files.join(output, _FOLDER), "*/*.json"):
        run = file.uri.rsplit("/", 2)[-2]
        seen[run] = max(seen.get(run, 0.0), file.modified)
    return seen


def sum_stats(parts: Iterable[EngineStats]) -> EngineStats:
    """Several engines as one; zeros where there is none."""
    found = list(parts)
    tables: dict[str, Any] = {name: dict(sum((Counter(getattr(part, name)) for part in found), Counter()))
              for name in ("failures", "restarts")}
    names = [item.name for item in fields(EngineStats) if item.name not in tables]
    sums = {name: sum(getattr(part, name) for part in found) for name in names}
    return EngineStats(**sums, **tables)


def _idle() -> EngineStats:
    return sum_stats(())


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSample:
    """What one process has done so far; `engine` and what stands beside it are zero while it has no engine.

    `reused` rows were done before this run; the other rows were answered or failed here.  Seconds count from the
    process's beginning.  `fill` is the mean share of the engine's slots in use; `pages_peak` is
    the most KV pages in use whenever a row was finished.  `moves` are rows that left for another round: all were
    computed again there, `kv` of them would have come along cheaper as pages.
    `kernels` names the kernel set and its instruction path.  Of weights that are not in memory `streamed_bytes` were
    read, for which steps waited `stream_seconds`; `direct_files` of `stream_files` are read past the page cache.
    """

    process: str
    elapsed_seconds: float = 0.0
    last_row_seconds: float = 0.0
    answered: int = 0
    failed: dict[str, int] = field(default_factory=dict)
    reused: int = 0
    moves: dict[str, int] = field(default_factory=dict)
    engines: int = 0
    load_seconds: float = 0.0
    engine: EngineStats = field(default_factory=_idle)
    fill: float = 0.0
    pages_peak: int = 0
    deterministic: bool = True
    numeric_print: str = ""
    kernels: str = ""
    streamed_bytes: int = 0
    stream_seconds: float = 0.0
    stream_files: int = 0
    direct_files: int = 0

    @property
    def failed_rows(self) -> int:
        """Failed rows of every code."""
        return sum(self.failed.values())

    @property
    def computed(self) -> int:
        """Rows that this run has answered or given up."""
        return self.answered + self.failed_rows

    @property
    def done(self) -> int:
        """Rows with an answer or a failure, whichever run found it."""
        return self.computed + self.reused

    def to_json(self) -> bytes:
        """The content of a progress file."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> ProgressSample:
        """The inverse of `to_json`; a `ValueError`, `KeyError` or `TypeError` for other content."""
        values = json.loads(data)
        return cls(**{**values, "engine": EngineStats(**values["engine"])})

    def as_facts(self) -> dict[str, object]:
        """All figures under one another, for a report."""
        values = asdict(self)
        engine = values.pop("engine")
        return {**values, **engine}


def total(samples: Iterable[ProgressSample]) -> ProgressSample:
    """All processes as one: sums, the mean fill over all steps, the longest time; deterministic only if all are."""
    parts = list(samples)
    failed: Counter[str] = Counter()
    moves: Counter[str] = Counter()
    for part in parts:
        failed.update(part.failed)
        moves.update(part.moves)
    engine = sum_stats(part.engine for part in parts)
    return ProgressSample(
        process="all",
        elapsed_seconds=max((part.elapsed_seconds for part in parts), default=0.0),
        last_row_seconds=max((part.last_row_seconds for part in parts), default=0.0),
        answered=sum(part.answered for part in parts),
        failed=dict(failed),
        reused=sum(part.reused for part in parts),
        moves=dict(moves),
        engines=sum(part.engines for part in parts),
        load_seconds=sum(part.load_seconds for part in parts),
        engine=engine,
        fill=sum(part.fill * part.engine.steps for part in parts) / max(engine.steps, 1),
        pages_peak=sum(part.pages_peak for part in parts),
        deterministic=all(part.deterministic for part in parts),
        numeric_print=" ".join(sorted({part.numeric_print for part in parts if part.numeric_print})),
        kernels=" and ".join(sorted({part.kernels for part in parts if part.kernels})),
        streamed_bytes=sum(part.streamed_bytes for part in parts),
        stream_seconds=sum(part.stream_seconds for part in parts),
        stream_files=sum(part.stream_files for part in parts),
        direct_files=sum(part.direct_files for part in parts),
    )


@dataclass(frozen=True, slots=True)
class Readings:
    """The samples of a run's processes, and how many files could not be read as such; a listing that fails is one."""

    samples: Sequence[ProgressSample]
    unreadable: int


def read_samples(folder: str) -> Readings:
    """The samples of every process of a run, none before the first was written."""
    try:
        paths = files.list_files(files.join(folder, "*.json"))
    except store_errors() as error:
        LOG.warning("progress files in %s were not listed: %s", folder, error)
        return Readings([], 1)
    found = [_read_sample(path) for path in paths]
    samples = [sample for sample in found if sample is not None]
    return Readings(samples, len(found) - len(samples))


def _read_sample(path: str) -> ProgressSample | None:
    try:
        return ProgressSample.from_json(files.read_bytes(path))
    except store_errors():
        return None
    except (ValueError, KeyError, TypeError):
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
                files.write_atomically(self._path, sample().to_json())
            except store_errors() as error:
                LOG.warning("progress file %s was not written: %s", self._path, error)
        return True

    def close(self) -> None:
        """End the thread; the last sample stays.

        The thread itself may be the caller: while it writes it holds its owner, perhaps as the last one.
        """
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()
