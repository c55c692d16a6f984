"""The stateful step: lanes of rows in, answers out, one engine per process behind it.

State is the truth, the engine is a cache: a row that a bundle admitted leaves it as an answer, as a continuation record
or in the bag `admitted`; keys that left go into the bag `done`; the difference is what the engine is asked for at the
first touch of a lane in a bundle.  A watermark timer at the end of the window finishes the lane.  There is no real-time
timer (one local runner loses rows with it) and nothing is drained per chunk.
Does not know how rows are scheduled, what the journal says of them, nor files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.coders import StrUtf8Coder
from apache_beam.pvalue import TaggedOutput
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import BagStateSpec, TimerSpec, on_timer

from batchgen_beam.errors import EngineError
from batchgen_beam.records import Answer, ContinuationRecord, EngineRow
from batchgen_beam.transforms.host import HostHandle
from batchgen_beam.transforms.lane_ledger import LaneLedger
from batchgen_beam.transforms.lane_names import lane_index
from batchgen_beam.transforms.lanes import PromptChunk, PromptChunkCoder, hash_range, split_chunks
from batchgen_beam.transforms.metrics import EngineMetrics, RowMetrics

__all__ = ["Generate", "GenerateLane", "Generated", "Round"]

ANSWERS = "answers"
CONTINUED = "continued"

CONGESTED_WAIT_SECONDS = 0.1
FINISH_WAIT_SECONDS = 1.0
"""How long one look at the lane's outbox may block: also how soon a dead driver is noticed."""

State = Any
Keyed = tuple[str, Answer]


class Round(NamedTuple):
    """One of the rounds of a run.

    `hashed`: so many lanes share all key hashes evenly; None: rows lie in lanes as a planner put them.  `tail`: once a
    process has at most this share of its engine's capacity unanswered, the rows of finished lanes leave; None: none do.
    """

    number: int = 1
    hashed: int | None = None
    tail: float | None = None


class GenerateLane(beam.DoFn):
    """(lane, PromptChunk) -> (row key text, Answer) or, on `continued`, ContinuationRecord; each row once."""

    ADMITTED = BagStateSpec("admitted", PromptChunkCoder())
    DONE = BagStateSpec("done", StrUtf8Coder())
    FINISH = TimerSpec("finish", TimeDomain.WATERMARK)

    def __init__(self, handle: HostHandle, this: Round) -> None:
        self._handle = handle
        self._round = this
        self._rows = RowMetrics()
        self._figures = EngineMetrics()

    def setup(self) -> None:
        """The process's host; its engine is loaded when the first row comes."""
        self._host = self._handle.acquire()

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
            self._submit(lane, ledger, fresh)
        yield from self._give(ledger, ledger.take_early(), done)
        yield from self._collect(lane, ledger, done, timeout=0.0)
        while self._engine.driver.congested():
            answers = self._engine.driver.relieve(self._box(lane), timeout=CONGESTED_WAIT_SECONDS)
            yield from self._give(ledger, answers, done)
        self._compact(ledger, admitted, done)

    @on_timer(FINISH)
    def finish_lane(
        self,
        lane: str = beam.DoFn.KeyParam,
        admitted: State = beam.DoFn.StateParam(ADMITTED),
        done: State = beam.DoFn.StateParam(DONE),
    ) -> Iterator[Keyed | TaggedOutput]:
        """The lane's input has ended: give the rest, then forget the lane."""
        ledger = self._open(lane, admitted, done)
        driver = self._engine.driver
        driver.fed(self._box(lane))
        yield from self._give(ledger, ledger.take_early(), done)
        while driver.pending(self._box(lane)):
            if self._in_tail():
                yield from self._leave(lane, ledger)
            yield from self._collect(lane, ledger, done, timeout=FINISH_WAIT_SECONDS)
        if ledger.unfinished:
            raise EngineError(f"{len(ledger.unfinished)} rows of {lane} got no answer, "
                              f"the first is {ledger.unfinished[0].key.uuid!r}")
        admitted.clear()
        done.clear()
        del self._ledgers[lane]
        driver.close_lane(self._box(lane))
        self._figures.count_work(self._engine.unreported_work())
        self._figures.fill(driver.stats().fill)
        self._engine.lane_finished()
        self._host.report()

    def teardown(self) -> None:
        """The last word of this process, where lanes were begun here and finished elsewhere."""
        self._host.report()

    def _box(self, lane: str) -> str:
        """The lane's name among those of all rounds."""
        return f"{self._round.number}/{lane}"

    def _open(self, lane: str, admitted: State, done: State) -> LaneLedger:
        ledger = self._ledgers.get(lane)
        if ledger is None:
            self._engine = self._host.engine()
            chunks = admitted.read()
            ledger = LaneLedger((row for chunk in chunks for row in chunk.prompts), done.read())
            self._engine.driver.open_lane(self._box(lane))
            self._ledgers[lane] = ledger
            intake = self._engine.intake(*self._hashes(lane))
            if intake is not None:
                intake.refresh()
            self._submit(lane, ledger, ledger.unfinished)
            self._figures.loads(self._engine.unreported_loads())
        return ledger

    def _hashes(self, lane: str) -> tuple[int, int]:
        return (0, 1 << 64) if self._round.hashed is None else hash_range(lane_index(lane), self._round.hashed)

    def _submit(self, lane: str, ledger: LaneLedger, rows: Sequence[EngineRow]) -> None:
        """Ask the engine for what nobody has answered yet."""
        intake = self._engine.intake(*self._hashes(lane))
        if intake is not None:
            admission = intake.admit(rows)
            ledger.keep(admission.answers)
            rows = admission.rows
        self._engine.driver.submit(self._box(lane), rows)

    def _in_tail(self) -> bool:
        if self._round.tail is None:
            return False
        driver = self._engine.driver
        return driver.unanswered() <= self._round.tail * driver.stats().capacity

    def _leave(self, lane: str, ledger: LaneLedger) -> Iterator[TaggedOutput]:
        """MIGRATE: what is unanswered goes on in the next round."""
        for record in self._engine.driver.suspend(self._box(lane)):
            ledger.leave(record.key.text)
            yield TaggedOutput(CONTINUED, record)

    def _collect(self, lane: str, ledger: LaneLedger, done: State, *, timeout: float) -> Iterator[Keyed]:
        yield from self._give(ledger, self._engine.driver.take(self._box(lane), timeout=timeout), done)

    def _give(self, ledger: LaneLedger, answers: list[Answer], done: State) -> Iterator[Keyed]:
        for answer in answers:
            row = ledger.accept(answer)
            if row is not None:
                done.add(answer.key.text)
                finished = self._host.wording().answer_to(row, answer)
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


class Generated(NamedTuple):
    """(row key text, Answer), and a ContinuationRecord for each row that goes on in the next round."""

    answers: beam.PCollection
    continued: beam.PCollection


class Generate(beam.PTransform):
    """(lane, PromptChunk) -> Generated."""

    def __init__(self, handle: HostHandle, this: Round) -> None:
        super().__init__()
        self._handle = handle
        self._round = this

    def expand(self, chunks: beam.PCollection) -> Generated:
        """See the class."""
        step = beam.ParDo(GenerateLane(self._handle, self._round)).with_output_types(
            tuple[str, Answer], continued=ContinuationRecord).with_resource_hints(**self._handle.settings.needs.hints())
        outputs = chunks | "GenerateLane" >> step.with_outputs(CONTINUED, main=ANSWERS)
        return Generated(outputs[ANSWERS], outputs[CONTINUED])
