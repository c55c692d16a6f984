"""Engines over fake models, prompts, and ways to run them to the end.  Shared by the engine's tests."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from batchgen_beam.config.families.fake import FakeConfig
from batchgen_beam.engine.engine import Engine
from batchgen_beam.engine.scheduler import Plan, Snapshot, schedule
from batchgen_beam.engine.sequence import Status
from batchgen_beam.engine.stats import EngineFacts
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.fake import FakeModel
from batchgen_beam.models.interface import Model
from batchgen_beam.records import Answer, Outcome, Prompt, RowKey, SamplingParams, token_array
from batchgen_beam.settings import EngineSettings

FACTS = EngineFacts(eos_ids=frozenset(), text_vocabulary=256, content_print="content", numeric_print="numeric")
KERNELS = TorchKernels(torch.float32)


def fake_model(kind: str = "paged", *, context: int = 1024, layers: int = 2, window: int = 100) -> FakeModel:
    """A fake model that never ends by itself."""
    return FakeModel(FakeConfig(kind=kind, window=window, num_hidden_layers=layers, max_position_embeddings=context,
                                eos_every=0), KERNELS)


def kv_bytes(model: Model, pages: int) -> int:
    """KV memory that buys `pages` usable pages of a model with one paged group."""
    specs = [spec for layer in model.layers for spec in layer.cache_spec()]
    return pages * 64 * sum(spec.item_bytes for spec in specs)


def engine(model: Model | None = None, *, facts: EngineFacts = FACTS, schedule: Callable[[Snapshot], Plan] = schedule,
           clock: Callable[[], float] = time.monotonic, **settings: int) -> Engine:
    """An engine with small default budgets."""
    defaults = EngineSettings(dtype="float32", max_rows=8, step_tokens=256, prefill_chunk=64, kv_memory=1 << 22)
    return Engine(model or fake_model(), KERNELS, replace(defaults, **settings), facts, schedule=schedule,
                  clock=clock)


def prompt(name: str, length: int, *, max_tokens: int | None = 40, **params: float) -> Prompt:
    """A prompt whose ids follow from its name."""
    draw = random.Random(name)
    ids = token_array(draw.randrange(32, 127) for _ in range(length))
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **params})
    return Prompt(key=RowKey(uuid=name, digest="0" * 64), token_ids=ids, params=sampling)


def run(rig: Engine, prompts: Iterable[Prompt], *, bound: int = 100_000) -> dict[str, Answer]:
    """Submit all, step to the end within `bound` steps, check every invariant, and return the answers by id."""
    for one in prompts:
        rig.submit(one)
    return finish(rig, bound=bound)


def finish(rig: Engine, *, bound: int = 100_000) -> dict[str, Answer]:
    """Step to the end and demand an answer once per id, balanced pages and an empty engine."""
    answers: list[Answer] = rig.poll()
    for _ in range(bound):
        if not rig.step():
            break
        rig.check_integrity()
        answers += rig.poll()
    assert not rig.step(), f"not finished after {bound} steps"
    rig.check_integrity()
    stats = rig.stats()
    assert stats.pages_used == 0
    assert len(answers) == len({answer.key for answer in answers})
    return {answer.key.uuid: answer for answer in answers}


def said(answers: dict[str, Answer]) -> dict[str, tuple[object, ...]]:
    """What determinism promises: ids, finish reason and the bits of all log-probabilities."""
    return {name: bits(answer) for name, answer in answers.items()}


def bits(answer: Answer) -> tuple[object, ...]:
    """The same for one answer, which must be an outcome."""
    assert isinstance(answer, Outcome), answer
    logprobs = answer.logprobs
    return (tuple(answer.token_ids), answer.finish_reason, logprobs.chosen.tobytes(), tuple(logprobs.top_ids),
            logprobs.top.tobytes())


class Churn:
    """A schedule that, every `every` calls, holds or evicts running rows before the real schedule goes on.

    Rows take turns, the oldest is only ever held, and every other one is both held and evicted until each was
    disturbed `times` in both ways.
    """

    def __init__(self, every: int, times: int = 2) -> None:
        self.holds: dict[int, int] = {}
        self.evictions: dict[int, int] = {}
        self._every = every
        self._times = times
        self._calls = 0

    def __call__(self, snapshot: Snapshot) -> Plan:
        self._calls += 1
        if self._calls % self._every:
            return schedule(snapshot)
        decoding = sorted(row.seq_id for row in snapshot.rows if row.status is Status.DECODE)
        hold = self._choose(decoding, self.holds, least=0)
        room = min(snapshot.free_host)
        pages = {row.seq_id: max(row.pages) for row in snapshot.rows}
        hold = [seq_id for index, seq_id in enumerate(hold) if sum(pages[i] for i in hold[: index + 1]) <= room][:2]
        evict = [seq_id for seq_id in self._choose(decoding, self.evictions, least=1) if seq_id not in hold][:2]
        for chosen, counts in ((hold, self.holds), (evict, self.evictions)):
            for seq_id in chosen:
                counts[seq_id] = counts.get(seq_id, 0) + 1
        return Plan(hold=tuple(hold), evict=tuple(evict)) if hold or evict else schedule(snapshot)

    def _choose(self, decoding: Sequence[int], counts: dict[int, int], *, least: int) -> list[int]:
        return [seq_id for seq_id in decoding if seq_id >= least and counts.get(seq_id, 0) < self._times]
