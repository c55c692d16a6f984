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
from typing import cast

from batchgen_beam.engine.engine import Engine
from batchgen_beam.errors import OptionError
from batchgen_beam.models.interface import BatchView, KernelSet, Model, Scores
from batchgen_beam.records import Failure, Prompt, RowKey, SamplingParams, token_array
from batchgen_beam.settings import PAGE_TOKENS, EngineSettings
from batchgen_beam.transforms.timed_engine import formats_of, timed_engine

__all__ = ["STEPS", "StepTime", "measure_prompts", "measure_steps"]

STEPS = 16
PROMPT_TOKENS = 512


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

    `attention_batch` and `expert_batch` as in `EngineSettings`.  `OptionError` where the model does not take so long a
    context.
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
    dtype, kv_dtype = formats_of(kernels)
    settings = EngineSettings(dtype=dtype, kv_dtype=kv_dtype, max_rows=rows, kv_memory=1 << 44,
                              max_context=context + PAGE_TOKENS, step_tokens=step_tokens, prefill_chunk=0,
                              prefix_sharing=False, attention_batch=attention_batch, expert_batch=expert_batch)
    return timed_engine(cast(Model, timed), kernels, settings), timed


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
