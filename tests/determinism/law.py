"""The determinism law as a procedure: the same rows under every disturbance, compared bit by bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from batchgen_beam.engine.driver import Driver
from batchgen_beam.engine.engine import Engine
from batchgen_beam.engine.scheduler import Schedule, schedule
from batchgen_beam.engine.stats import EngineFacts
from batchgen_beam.models.interface import KernelSet, Model
from batchgen_beam.records import Answer, ContinuationRecord, Prompt
from batchgen_beam.settings import EngineSettings
from tests.engine.rigs import Churn, finish, kv_bytes, run, said

__all__ = ["Bits", "Law"]

SUB_BATCHES = ((1, 0), (3, 16), (0, 1))
"""Rows of an attention sub-batch and tokens of a feed-forward batch, 0: all."""

Bits = dict[str, tuple[object, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """One model, its rows, and the ways to run them."""

    model: Model
    kernels: KernelSet
    facts: EngineFacts
    settings: EngineSettings
    prompts: Sequence[Prompt]

    def engine(self, *, plan: Schedule = schedule, **settings: int) -> Engine:
        """A fresh engine under other budgets."""
        return Engine(self.model, self.kernels, replace(self.settings, **settings), self.facts, schedule=plan)

    def alone(self, names: Sequence[str] | None = None) -> Bits:
        """Each row in an engine of its own."""
        chosen = [one for one in self.prompts if names is None or one.key.uuid in names]
        return {name: bits for one in chosen for name, bits in said(run(self.engine(), [one])).items()}

    def batched(self, rows: int, *, chunk: int = 64, seed: int | None = None) -> Bits:
        """At most `rows` at once, prompts in chunks, shuffled if there is a seed."""
        order = list(self.prompts) if seed is None else random.Random(seed).sample(self.prompts, len(self.prompts))
        return said(run(self.engine(max_rows=rows, prefill_chunk=chunk), order))

    def sub_batched(self, attention: int, expert: int) -> Bits:
        """All at once, the attention of some rows and the feed-forward part of some tokens at a time."""
        return said(run(self.engine(max_rows=len(self.prompts), attention_batch=attention, expert_batch=expert),
                        self.prompts))

    def churned(self, every: int, host_pages: int, pages: int, *, sharing: bool = True, times: int = 2,
                **sizes: int) -> tuple[Bits, Churn]:
        """A small pool in which every row is held and evicted at least `times` (the oldest is only held)."""
        churn = Churn(every=every, times=times)
        rig = self.engine(plan=churn, kv_memory=kv_bytes(self.model, pages), prefix_sharing=sharing,
                          kv_host_memory=kv_bytes(self.model, host_pages), **sizes)
        return said(run(rig, self.prompts)), churn

    def in_lanes(self, lanes: int) -> Bits:
        """Through the driver, dealt over some lanes."""
        rig = Driver(self.engine())
        answers: dict[str, Answer] = {}
        try:
            for lane in range(lanes):
                rig.open_lane(str(lane), self.prompts[lane::lanes])
            for lane in range(lanes):
                while rig.pending(str(lane)):
                    answers |= {answer.key.uuid: answer for answer in rig.take(str(lane), timeout=60)}
        finally:
            rig.close(timeout=60)
        return said(answers)

    def resumed_after_each_event(self, rows: int) -> list[Bits]:
        """The first rows together; after every event all are rebuilt from their records in a fresh engine."""
        found: list[Bits] = []
        events, over = 0, False
        while not over:
            rig = self.engine()
            for one in self.prompts[:rows]:
                rig.submit(one)
            while rig.stats().events <= events and rig.step():
                pass
            events = rig.stats().events
            answers: dict[str, Answer] = {answer.key.uuid: answer for answer in rig.poll()}
            records = rig.suspend_all()
            over = not records
            fresh = self.engine()
            for record in records:
                fresh.resume(ContinuationRecord.from_bytes(record.to_bytes()))
            found.append(said(answers | finish(fresh)))
        return found

    def disturbances(self, chunks: Sequence[int], rows: Sequence[int]) -> dict[str, Callable[[], Bits]]:
        """All runs that must agree, by name."""
        named: dict[str, Callable[[], Bits]] = {f"rows={n}": lambda n=n: self.batched(n) for n in rows}
        named |= {f"chunk={n}": lambda n=n: self.batched(len(self.prompts), chunk=n) for n in chunks}
        named |= {f"attention by {rows}, feed-forward by {tokens}": lambda a=rows, e=tokens: self.sub_batched(a, e)
                  for rows, tokens in SUB_BATCHES}
        named["no sharing"] = lambda: said(run(self.engine(prefix_sharing=False), self.prompts))
        named["shuffled"] = lambda: self.batched(len(self.prompts), seed=11)
        named["one lane"] = lambda: self.in_lanes(1)
        named["two lanes"] = lambda: self.in_lanes(2)
        return named
