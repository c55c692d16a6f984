"""A model folder made into a running engine.

Owns the order: threads fixed, kernels tested on this machine, weights loaded, prints computed, driver started.  Does
not know Beam, rows or who shares the engine.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from batchgen_beam.engine.driver import Driver, Recorder
from batchgen_beam.engine.engine import Engine
from batchgen_beam.engine.stats import EngineFacts
from batchgen_beam.engine.tail_rule import TailRule, plan_tail
from batchgen_beam.kernels.choice import choose_kernels, settle_threads
from batchgen_beam.kernels.packing import packing_of
from batchgen_beam.kernels.self_test import SelfTest, check_invariance
from batchgen_beam.models.interface import KernelSet, Model
from batchgen_beam.records import Fingerprint
from batchgen_beam.settings import EngineSettings
from batchgen_beam.transforms.model_folder import ModelFolder
from batchgen_beam.transforms.model_shapes import model_shapes
from batchgen_beam.transforms.prints import numeric_print
from batchgen_beam.transforms.tail_processes import TailProcesses
from batchgen_beam.weights.loader import load_model
from batchgen_beam.weights.tiered_loader import load_tiered

__all__ = ["LoadedEngine", "load_engine"]

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEngine:
    """The driver of a running engine, and what is known about its arithmetic.

    `longest_row`: the greatest context (tokens) that its KV memory holds, at most `context_limit`.  `token_bytes`: the
    KV of one token.
    """

    driver: Driver
    context_limit: int
    longest_row: int
    token_bytes: int
    self_test: SelfTest
    numeric: Fingerprint
    tail: TailProcesses | None = None

    def close(self) -> None:
        """End the driver's thread, and the tail's processes after it."""
        self.driver.close()
        if self.tail is not None:
            self.tail.close()

    @property
    def kernels(self) -> str:
        """The kernel set and, where it has several, its instruction path."""
        facts = dict(self.numeric.facts)
        return " ".join(str(facts[name]) for name in ("kernels", "path") if name in facts)

    def summary(self) -> str:
        """The facts in one line."""
        return ", ".join(f"{name} {value}" for name, value in self.numeric.facts)


def load_engine(model: ModelFolder, settings: EngineSettings, content: str, cache: Path,
                recorder: Recorder | None = None, *, rule: TailRule = plan_tail) -> LoadedEngine:
    """Test the kernels, load the weights, start the driver.  `content` is the digest of the content print,
    `cache` a folder for what is found out about this machine.

    `recorder` keeps what has to outlive the process; `settings` give the threads and the memory for weights and KV.
    With tail processes, `rule` says whether the last row goes on in them.
    Kernels whose self-test fails run all the same, but every answer's numeric print says that they are not
    deterministic.  Raises `OptionError` where the KV memory does not hold one page of each cache group, the weights
    can't be streamed in theirs, or the wanted kernels can't be had.
    """
    torch.set_num_threads(settings.threads)
    shapes = model_shapes(model.config)
    kernels = choose_kernels(getattr(torch, settings.dtype), shapes, wanted=settings.kernels, threads=settings.threads,
                             cache=cache, kv_dtype=settings.kv_dtype)
    test = check_invariance(kernels, shapes)  # before the weights: what it packs is not in memory beside them
    weights = _load_weights(model.path, kernels, settings.weight_memory, cache)
    settle_threads(kernels)
    for failure in test.failures:
        LOG.error("self-test of the %s kernels failed, answers may depend on their batch: %s", kernels.name, failure)
    numeric = numeric_print(kernels.facts(), deterministic=test.deterministic)
    facts = EngineFacts(eos_ids=model.eos_ids, text_vocabulary=model.text_vocabulary, content_print=content,
                        numeric_print=numeric.digest)
    engine = Engine(weights, kernels, settings, facts)
    tail = None if settings.tail_processes == 1 else TailProcesses(model.path, kernels, settings)
    split = None if tail is None else tail.tail_engine(engine, weights, kernels, facts, rule=rule)
    driver = Driver(split or engine, recorder)
    if split is not None:
        split.may_refill = driver.may_refill
    return LoadedEngine(driver=driver, context_limit=engine.context_limit, longest_row=engine.longest_row,
                        token_bytes=engine.token_bytes, self_test=test, numeric=numeric, tail=tail)


def _load_weights(folder: Path, kernels: KernelSet, limit: int, cache: Path) -> Model:
    """All in memory, or what `limit` bytes hold of them; the packed copy of the others lies in `cache`."""
    if not limit:
        return load_model(folder, kernels)
    return load_tiered(folder, kernels, packing_of(kernels), limit=limit, cache=cache).model
