"""How long a step of a model takes on this machine, by rows at once, and where the time goes.

The real engine decodes rows of random tokens, greedily; a step is timed once all rows decode.  Owns the measurement.
Does not know how anything is computed, or who reads the figures.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from batchgen_beam.config.model_registry import load_config
from batchgen_beam.engine.engine import Engine
from batchgen_beam.engine.stats import EngineFacts
from batchgen_beam.errors import OptionError
from batchgen_beam.kernels.choice import choose_kernels
from batchgen_beam.models.interface import BatchView, KernelSet, Model, Scores
from batchgen_beam.records import Failure, Prompt, RowKey, SamplingParams, token_array
from batchgen_beam.settings import PAGE_TOKENS, EngineSettings
from batchgen_beam.transforms.model_shapes import model_shapes
from batchgen_beam.weights.loader import load_model

__all__ = ["STEPS", "StepTime", "load_timed", "measure_prompts", "measure_steps"]

STEPS = 16
PROMPT_TOKENS = 512


def load_timed(folder: Path, *, dtype: str, kv_dtype: str, kernels: str, threads: int,
               cache: Path) -> tuple[Model, KernelSet]:
    """A model and the kernel set that it runs on; fixes the threads of this process."""
    torch.set_num_threads(threads)
    found = choose_kernels(getattr(torch, dtype), model_shapes(load_config(str(folder))), wanted=kernels,
                           threads=threads, cache=cache, kv_dtype=kv_dtype)
    return load_model(folder, found), found


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One decode step of `rows` rows: median, least and greatest seconds, and the mean of each part.

    `engine` among the parts is what sampling, scheduling and packing take beside the model.
    """

    rows: int
    median: float
    least: float
    greatest: float
    parts: Mapping[str, float]


def measure_steps(model: Model, kernels: KernelSet, rows: int, *, context: int, steps: int = STEPS,
                  attention_batch: int = 0, expert_batch: int = 0) -> StepTime:
    """Decode `steps` tokens of `rows` rows that end at `context` tokens, which is more than `steps` + 1.

    `attention_batch` and `expert_batch` as in `EngineSettings`.  `OptionError` where the model does not take so long a context.
    """
    if not steps + 1 < context <= model.context_limit - PAGE_TOKENS:
        raise OptionError(f"--context must be between {steps + 2} and {model.context_limit - PAGE_TOKENS} for this "
                          f"model, got {context}")
    length = context - steps - 1
    engine, forward = _engine(model, kernels, rows, context, step_tokens=rows * length,
                              attention_batch=attention_batch, expert_batch=expert_batch)
    for prompt in _prompts(rows, length, steps + 1, model.vocab_size):
        engine.submit(prompt)
    _step(engine)
    before, forward.seconds, seconds = dict(kernels.seconds()), 0.0, []
    for _ in range(steps):
        started = time.perf_counter()
        _step(engine)
        seconds.append(time.perf_counter() - started)
    parts = {part: (total - before[part]) / len(seconds) for part, total in kernels.seconds().items()}
    parts = parts or {"model": forward.seconds / len(seconds)}
    parts["engine"] = statistics.fmean(seconds) - forward.seconds / len(seconds)
    return StepTime(rows=rows, median=statistics.median(seconds), least=min(seconds), greatest=max(seconds),
                    parts=parts)


def measure_prompts(model: Model, kernels: KernelSet, *, rows: int = 8, length: int = PROMPT_TOKENS) -> float:
    """Prompt tokens per second, of `rows` prompts of so many tokens whose answers have one token."""
    engine, _ = _engine(model, kernels, rows, length + 1, step_tokens=length)
    for prompt in _prompts(rows + 1, length, 1, model.vocab_size):
        engine.submit(prompt)
    _step(engine)
    started = time.perf_counter()
    while engine.stats().rows_done <= rows:
        _step(engine)
    return rows * length / (time.perf_counter() - started)


class _TimedModel:
    """A model that knows how long its forward passes took."""

    def __init__(self, model: Model) -> None:
        self.seconds = 0.0
        self.vocab_size, self.context_limit, self.layers = model.vocab_size, model.context_limit, model.layers
        self.embed, self.head = model.embed, model.head
        self._forward = model.forward

    def forward(self, view: BatchView) -> Scores:
        """The model's."""
        started = time.perf_counter()
        scores = self._forward(view)
        self.seconds += time.perf_counter() - started
        return scores


def _engine(model: Model, kernels: KernelSet, rows: int, context: int, *, step_tokens: int,
            attention_batch: int = 0, expert_batch: int = 0) -> tuple[Engine, _TimedModel]:
    timed = _TimedModel(model)
    dtype, kept = (str(one).removeprefix("torch.") for one in (kernels.dtype, kernels.kv_dtype))
    settings = EngineSettings(dtype=dtype, kv_dtype="auto" if kept == dtype else kept, max_rows=rows, kv_memory=1 << 44,
                              max_context=context + PAGE_TOKENS, step_tokens=step_tokens, prefill_chunk=0,
                              prefix_sharing=False, attention_batch=attention_batch, expert_batch=expert_batch)
    facts = EngineFacts(eos_ids=frozenset(), text_vocabulary=model.vocab_size, content_print="", numeric_print="")
    return Engine(cast(Model, timed), kernels, settings, facts), timed


def _prompts(rows: int, length: int, max_tokens: int, vocabulary: int) -> Iterator[Prompt]:
    draw = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    for row in range(rows):
        ids = token_array(draw.randrange(vocabulary) for _ in range(length))
        yield Prompt(key=RowKey(f"{row}", "bench"), token_ids=ids, params=params)


def _step(engine: Engine) -> None:
    engine.step()
    for answer in engine.poll():
        if isinstance(answer, Failure):
            raise OptionError(f"the model can't be timed: {answer.message}")
