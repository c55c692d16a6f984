"""The stateful step: lanes of prompts in, answers out, one engine per process behind it.

State is the truth, the engine is a cache: a row that a bundle admitted leaves it as an answer or in the bag
`admitted`; keys whose answer was yielded go into the bag `done`; the difference is what the engine is asked for at
the first touch of a lane in a bundle.  A watermark timer at the end of the window finishes the lane.  There is no
real-time timer (one local runner loses rows with it) and nothing is drained per chunk.
Does not know how rows are scheduled, nor files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import apache_beam as beam
from apache_beam.coders import StrUtf8Coder
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import BagStateSpec, TimerSpec, on_timer

from batchgen_beam.errors import EngineError
from batchgen_beam.records import Answer
from batchgen_beam.transforms.host import HostHandle
from batchgen_beam.transforms.lane_ledger import LaneLedger
from batchgen_beam.transforms.lanes import PromptChunk, PromptChunkCoder, split_chunks
from batchgen_beam.transforms.metrics import EngineMetrics, RowMetrics

__all__ = ["Generate", "GenerateLane"]

CONGESTED_WAIT_SECONDS = 0.1
FINISH_WAIT_SECONDS = 1.0
"""How long one look at the lane's outbox may block: also how soon a dead driver is noticed."""

State = Any
Keyed = tuple[str, Answer]


class GenerateLane(beam.DoFn):
    """(lane, PromptChunk) -> (row key text, Answer), each row once."""

    ADMITTED = BagStateSpec("admitted", PromptChunkCoder())
    DONE = BagStateSpec("done", StrUtf8Coder())
    FINISH = TimerSpec("finish", TimeDomain.WATERMARK)

    def __init__(self, handle: HostHandle) -> None:
        self._handle = handle
        self._rows = RowMetrics()
        self._figures = EngineMetrics()

    def setup(self) -> None:
        """The process's engine, loaded by whoever comes first."""
        self._host = self._handle.acquire()
        self._engine = self._host.engine()

    def start_bundle(self) -> None:
        """What a former bundle knew is void: it may have been abandoned."""
        self._ledgers: dict[str, LaneLedger] = {}

    def process(
        self,
        element: tuple[str, PromptChunk],
        admitted: State = beam.DoFn.StateParam(ADMITTED),
        done: State = beam.DoFn.StateParam(DONE),
        finish: Any = beam.DoFn.TimerParam(FINISH),
        window: Any = beam.DoFn.WindowParam,
    ) -> Iterator[Keyed]:
        """Admit the chunk, give what has finished of this lane, wait only while the engine is congested."""
        lane, chunk = element
        finish.set(window.max_timestamp())
        ledger = self._open(lane, admitted, done)
        fresh = ledger.admit(chunk.prompts)
        if fresh:
            admitted.add(PromptChunk(tuple(fresh)))
            self._engine.driver.submit(lane, fresh)
        yield from self._give(ledger, ledger.take_early(), done)
        yield from self._collect(lane, ledger, done, timeout=0.0)
        while self._engine.driver.congested():
            answers = self._engine.driver.relieve(lane, timeout=CONGESTED_WAIT_SECONDS)
            yield from self._give(ledger, answers, done)
        self._compact(ledger, admitted, done)

    @on_timer(FINISH)
    def finish_lane(
        self,
        lane: str = beam.DoFn.KeyParam,
        admitted: State = beam.DoFn.StateParam(ADMITTED),
        done: State = beam.DoFn.StateParam(DONE),
    ) -> Iterator[Keyed]:
        """The lane's input has ended: give the rest, then forget the lane."""
        ledger = self._open(lane, admitted, done)
        while self._engine.driver.pending(lane):
            yield from self._collect(lane, ledger, done, timeout=FINISH_WAIT_SECONDS)
        if ledger.unfinished:
            raise EngineError(f"{len(ledger.unfinished)} rows of {lane} got no answer, "
                              f"the first is {ledger.unfinished[0].key.uuid!r}")
        admitted.clear()
        done.clear()
        self._figures.count_work(self._engine.unreported_work())
        self._figures.fill(self._engine.driver.stats().fill)
        self._host.report()

    def teardown(self) -> None:
        """The last word of this process, where lanes were begun here and finished elsewhere."""
        self._host.report()

    def _open(self, lane: str, admitted: State, done: State) -> LaneLedger:
        ledger = self._ledgers.get(lane)
        if ledger is None:
            chunks = admitted.read()
            ledger = LaneLedger((prompt for chunk in chunks for prompt in chunk.prompts), done.read())
            self._engine.driver.open_lane(lane, ledger.unfinished)
            self._ledgers[lane] = ledger
            self._figures.loads(self._engine.unreported_loads())
        return ledger

    def _collect(self, lane: str, ledger: LaneLedger, done: State, *, timeout: float) -> Iterator[Keyed]:
        yield from self._give(ledger, self._engine.driver.take(lane, timeout=timeout), done)

    def _give(self, ledger: LaneLedger, answers: list[Answer], done: State) -> Iterator[Keyed]:
        for answer in answers:
            prompt = ledger.accept(answer)
            if prompt is not None:
                done.add(answer.key.text)
                finished = self._engine.in_words(prompt, answer)
                self._rows.count(finished)
                self._host.count(finished)
                yield answer.key.text, finished

    @staticmethod
    def _compact(ledger: LaneLedger, admitted: State, done: State) -> None:
        if ledger.wants_compaction():
            admitted.clear()
            done.clear()
            for chunk in split_chunks(ledger.compacted()):
                admitted.add(chunk)


class Generate(beam.PTransform):
    """(lane, PromptChunk) -> (row key text, Answer)."""

    def __init__(self, handle: HostHandle) -> None:
        super().__init__()
        self._handle = handle

    def expand(self, chunks: beam.PCollection) -> beam.PCollection:
        """See the class."""
        step = beam.ParDo(GenerateLane(self._handle)).with_output_types(tuple[str, Answer])
        return chunks | "GenerateLane" >> step
