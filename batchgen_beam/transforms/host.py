"""The life of the engine in a worker process: loaded once, shared by all DoFns, stopped when dropped.

Owns the process-wide object behind the steps: the text side (for Prepare), the engine with its driver and its journal
(for Generate), the tally and the progress file.  Each part is made when it is first asked for, so that a process which
only prepares loads no weights.  Does not know Beam's steps.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from apache_beam.utils.shared import Shared

from batchgen_beam.engine.migration import Move, MoveCosts
from batchgen_beam.records import Answer
from batchgen_beam.settings import EngineSettings, GenerationDefaults, WorkerNeeds
from batchgen_beam.text.prepare import Preparer
from batchgen_beam.transforms.engine_loader import LoadedEngine, load_engine
from batchgen_beam.transforms.lane_intake import LaneIntake
from batchgen_beam.transforms.leaving import HOLDERS
from batchgen_beam.transforms.metrics import ENGINE_WORK, Tally
from batchgen_beam.transforms.model_folder import ModelFolder, ModelSource
from batchgen_beam.transforms.progress_files import ProgressSample, ProgressWriter
from batchgen_beam.transforms.recording import EngineRecorder, JournalPlace
from batchgen_beam.transforms.replays import LaneReplays
from batchgen_beam.transforms.resources import available_cores, default_kv_memory
from batchgen_beam.transforms.wording import Wording

__all__ = ["EngineHost", "HostHandle", "HostSettings", "ProcessHost"]

LOG = logging.getLogger(__name__)

SUSPEND_SECONDS = 10.0
"""So long an engine may take to end its step when the process has to go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """What a worker process needs to know, small enough to travel with every step.

    Where `engine` leaves threads or KV memory open (0), each of a machine's `processes` takes its part of the cores,
    and of a quarter of the free memory.  `progress` None: no progress files.  `journal` None: nothing outlives the run.
    `needs` are of the machines that run engines.
    """

    source: ModelSource
    engine: EngineSettings
    defaults: GenerationDefaults
    content_print: str
    processes: int = 1
    progress: str | None = None
    progress_interval: float = 10.0
    journal: JournalPlace | None = None
    needs: WorkerNeeds = field(default_factory=WorkerNeeds)

    def open_model(self) -> ModelFolder:
        """The model's small files."""
        return self.source.open(max_context=self.engine.max_context)

    def engine_settings(self) -> EngineSettings:
        """The engine's settings on this machine, nothing left open."""
        cores = max(1, available_cores() // self.processes)
        return replace(self.engine, threads=self.engine.threads or cores,
                       kv_memory=self.engine.kv_memory or default_kv_memory(self.processes))


class EngineHost:
    """A loaded engine, and what is kept of its rows."""

    def __init__(self, loaded: LoadedEngine, recorder: EngineRecorder | None, seconds: float) -> None:
        self.loaded = loaded
        self.driver = loaded.driver
        self.load_seconds = seconds
        self._recorder = recorder
        self._lock = threading.Lock()
        self._unreported = [seconds]
        self._reported = dict.fromkeys(ENGINE_WORK, 0)
        self._intakes: dict[tuple[int, int], LaneIntake] = {}
        weakref.finalize(self, loaded.close)

    def intake(self, low: int, high: int) -> LaneIntake | None:
        """The intake of the lane of these key hashes; None where there is no journal."""
        recorder = self._recorder
        if recorder is None:
            return None
        with self._lock:
            found = self._intakes.get((low, high))
            if found is None:
                found = self._intakes[low, high] = LaneIntake(recorder, LaneReplays(recorder.place, low, high))
            return found

    def lane_finished(self) -> None:
        """Make what was answered durable; a `FatalError` if that can't be done."""
        if self._recorder is not None:
            self._recorder.flush()

    def cheaper_move(self, context: int) -> Move:
        """How the KV of a row of `context` tokens would best follow the row that has left this engine.

        The prefill speed is taken to be that of all tokens so far, decoded ones included: where decoding is slower,
        the true crossover lies at a longer context.
        """
        stats = self.driver.stats()
        tokens = stats.prefilled_tokens + stats.generated_tokens
        if not tokens or not stats.busy_seconds:
            return Move.RECOMPUTE
        costs = MoveCosts(kv_bytes=self.loaded.token_bytes, prefill_speed=tokens / stats.busy_seconds)
        return costs.cheaper(context)

    def suspend(self) -> None:
        """Stop stepping, and leave every row's state and answer behind; waiters get an `EngineError`."""
        self.driver.close(timeout=SUSPEND_SECONDS, suspend=True)
        if self._recorder is not None:
            self._recorder.close()

    def unreported_loads(self) -> list[float]:
        """Seconds of loads that no metric has counted yet; each is given once."""
        with self._lock:
            loads, self._unreported = self._unreported, []
            return loads

    def unreported_work(self) -> dict[str, int]:
        """How much has come to the engine's sums of `ENGINE_WORK` since the call before."""
        with self._lock:
            stats = self.driver.stats()
            before, self._reported = self._reported, {name: getattr(stats, name) for name in ENGINE_WORK}
            return {name: count - before[name] for name, count in self._reported.items()}


class ProcessHost:
    """The one object of a process for one run.  Any thread may ask it for its parts."""

    def __init__(self, settings: HostSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.tally = Tally()
        self.loads = 0
        self._settings = settings
        self._clock = clock
        self._started = clock()
        self._lock = threading.RLock()
        self._leaving = threading.Lock()
        self._left = False
        self._model: ModelFolder | None = None
        self._preparer: Preparer | None = None
        self._wording: Wording | None = None
        self._engine: EngineHost | None = None
        self._last_row = 0.0
        self._pages_peak = 0
        self._name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._writer: ProgressWriter | None = None
        if settings.progress is not None:
            self._writer = ProgressWriter(settings.progress, self._name, self.sample, settings.progress_interval)
            weakref.finalize(self, self._writer.close)
        HOLDERS.enter(self)

    def model(self) -> ModelFolder:
        """The model's small files."""
        with self._lock:
            if self._model is None:
                self._model = self._settings.open_model()
            return self._model

    def preparer(self) -> Preparer:
        """What makes prompts of rows."""
        with self._lock:
            if self._preparer is None:
                self._preparer = self.model().preparer(self._settings.defaults)
            return self._preparer

    def wording(self) -> Wording:
        """What turns answers into text."""
        with self._lock:
            if self._wording is None:
                self._wording = Wording(self.model())
            return self._wording

    def engine(self) -> EngineHost:
        """The engine, loaded by the first caller while the others wait.

        Raises:
            OptionError: the KV memory does not hold one page of each cache group.
        """
        with self._lock:
            if self._engine is None:
                started = self._clock()
                place = self._settings.journal
                recorder = None if place is None else EngineRecorder(place, self._name, self.wording())
                loaded = load_engine(self.model(), self._settings.engine_settings(), self._settings.content_print,
                                     Path(self._settings.source.model_cache), recorder)
                self._engine = EngineHost(loaded, recorder, self._clock() - started)
                self.loads += 1
                LOG.info("engine loaded in %.1f s: %s", self._engine.load_seconds, loaded.summary())
            return self._engine

    def count(self, answer: Answer) -> None:
        """One more row has left."""
        self.tally.count(answer)
        self._last_row = self._clock() - self._started
        if self._engine is not None:
            self._pages_peak = max(self._pages_peak, self._engine.driver.stats().pages_used)

    def judge_move(self, context: int) -> None:
        """A row of `context` tokens has left for another round: count how its KV would best have come along."""
        if self._engine is not None:
            self.tally.move(self._engine.cheaper_move(context))

    def sample(self) -> ProgressSample:
        """What this process has done so far."""
        answered, failed = self.tally.read()
        mine = ProgressSample(process=self._name, elapsed_seconds=self._clock() - self._started,
                              last_row_seconds=self._last_row, answered=answered, failed=failed,
                              reused=self.tally.reused, moves=self.tally.moves)
        engine = self._engine
        if engine is None:
            return mine
        stats = engine.driver.stats()
        return replace(
            mine, engines=self.loads, load_seconds=engine.load_seconds, engine=stats, fill=stats.fill,
            pages_peak=max(self._pages_peak, stats.pages_used),
            deterministic=engine.loaded.self_test.deterministic, numeric_print=engine.loaded.numeric.digest,
            kernels=engine.loaded.kernels)

    def suspend(self) -> None:
        """The process has to go: leave behind what it has come to, and say so."""
        with self._leaving:
            engine, self._left = None if self._left else self._engine, True
            if engine is not None:
                engine.suspend()
                self.report()

    def report(self) -> None:
        """Bring the progress file up to date now."""
        if self._writer is not None:
            self._writer.write()


class HostHandle:
    """What a DoFn carries: made once for the run, pickled with the steps, and the same object behind all of them."""

    def __init__(self, settings: HostSettings) -> None:
        self.settings = settings
        self._shared = Shared()

    def acquire(self) -> ProcessHost:
        """The process's host; call from `setup`."""
        settings = self.settings
        host: ProcessHost = self._shared.acquire(lambda: ProcessHost(settings))
        return host
