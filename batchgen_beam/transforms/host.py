"""The life of the engine in a worker process: loaded once, shared by all DoFns, stopped when dropped.

Owns the process-wide object behind the steps: the text side (for Prepare), the engine with its driver (for Generate),
the tally and the progress file.  Each part is made when it is first asked for, so that a process which only prepares
loads no weights.  Does not know Beam's steps, rows or lanes.
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
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from apache_beam.utils.shared import Shared

from batchgen_beam.records import Answer, Outcome
from batchgen_beam.settings import EngineSettings, GenerationDefaults
from batchgen_beam.text.detokenize import with_text
from batchgen_beam.text.prepare import Preparer
from batchgen_beam.transforms.engine_loader import LoadedEngine, load_engine
from batchgen_beam.transforms.memory import default_kv_memory
from batchgen_beam.transforms.metrics import Tally
from batchgen_beam.transforms.model_folder import ModelFolder
from batchgen_beam.transforms.model_store import resolve_model
from batchgen_beam.transforms.progress_files import ProgressSample, ProgressWriter

__all__ = ["EngineHost", "HostHandle", "HostSettings", "ProcessHost"]

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSettings:
    """What a worker process needs to know, small enough to travel with every step.

    `kv_memory` None: each of the host's `processes` takes its part of a quarter of the free memory.
    `progress` None: no progress files.
    """

    model: str
    model_cache: str
    engine: EngineSettings
    defaults: GenerationDefaults
    content_print: str
    clock: datetime
    template_file: str | None = None
    kv_memory: int | None = None
    processes: int = 1
    progress: str | None = None
    progress_interval: float = 10.0

    def open_model(self) -> ModelFolder:
        """The model's small files, converted first where it is a GGUF file."""
        template = None if self.template_file is None else Path(self.template_file)
        folder = resolve_model(self.model, Path(self.model_cache))
        return ModelFolder.open(folder, template_file=template, clock=self.clock, max_context=self.engine.max_context)

    def engine_settings(self) -> EngineSettings:
        """The engine's settings on this machine."""
        memory = default_kv_memory(self.processes) if self.kv_memory is None else self.kv_memory
        return replace(self.engine, kv_memory=memory)


class EngineHost:
    """A loaded engine and what turns its outcomes into text."""

    def __init__(self, loaded: LoadedEngine, model: ModelFolder, seconds: float) -> None:
        self.loaded = loaded
        self.driver = loaded.driver
        self.load_seconds = seconds
        self._model = model
        self._unreported = [seconds]
        weakref.finalize(self, loaded.driver.close)

    def with_text(self, answer: Answer) -> Answer:
        """The answer, an outcome with its text."""
        if isinstance(answer, Outcome):
            return with_text(answer, self._model.tokenizer, self._model.eos_ids)
        return answer

    def unreported_loads(self) -> list[float]:
        """Seconds of loads that no metric has counted yet; each is given once."""
        loads, self._unreported = self._unreported, []
        return loads


class ProcessHost:
    """The one object of a process for one run.  Any thread may ask it for its parts."""

    def __init__(self, settings: HostSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.tally = Tally()
        self.loads = 0
        self._settings = settings
        self._clock = clock
        self._started = clock()
        self._lock = threading.RLock()
        self._model: ModelFolder | None = None
        self._preparer: Preparer | None = None
        self._engine: EngineHost | None = None
        self._name = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._writer: ProgressWriter | None = None
        if settings.progress is not None:
            self._writer = ProgressWriter(settings.progress, self._name, self.sample, settings.progress_interval)
            weakref.finalize(self, self._writer.close)

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

    def engine(self) -> EngineHost:
        """The engine, loaded by the first caller while the others wait.

        Raises:
            OptionError: the KV memory does not hold one row of the context limit.
        """
        with self._lock:
            if self._engine is None:
                started = self._clock()
                model = self.model()
                loaded = load_engine(model, self._settings.engine_settings(), self._settings.content_print)
                self._engine = EngineHost(loaded, model, self._clock() - started)
                self.loads += 1
                LOG.info("engine loaded in %.1f s: %s", self._engine.load_seconds, loaded.summary())
            return self._engine

    def sample(self) -> ProgressSample:
        """What this process has done so far."""
        answered, failed = self.tally.read()
        mine = ProgressSample(process=self._name, elapsed_seconds=self._clock() - self._started, answered=answered,
                              failed=failed)
        engine = self._engine
        if engine is None:
            return mine
        stats = engine.driver.stats()
        return replace(
            mine, load_seconds=engine.load_seconds, active=stats.active, capacity=stats.capacity, queued=stats.queued,
            prompt_tokens=stats.prompt_tokens, generated_tokens=stats.generated_tokens,
            recomputed_tokens=stats.recomputed_tokens, pages_used=stats.pages_used, pages_total=stats.pages_total,
            evictions=stats.evictions, holds=stats.holds, steps=stats.steps, busy_seconds=stats.busy_seconds,
            fill=stats.fill, engines=self.loads, deterministic=engine.loaded.self_test.deterministic,
            numeric_print=engine.loaded.numeric.digest)

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
