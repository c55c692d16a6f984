"""A run in rounds: what is left of a long tail goes on elsewhere, spread evenly over the workers.

Owns what happens between two rounds: expected lengths to one planner, its lanes back to the rows as a side input, rows
to chunks in the plan's order.  The planner sees keys and numbers, never a record.  A Beam graph has no loop: the number
of rounds is fixed when it is built, and the last one drains.  KV never travels; each row that moves is judged, and
counted, by whether moving its pages would have been cheaper.  Does not know how a round runs its rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import apache_beam as beam
from apache_beam.pvalue import AsDict

from batchgen_beam.engine.round_plan import expected_remaining, plan_round
from batchgen_beam.errors import OptionError
from batchgen_beam.records import ContinuationRecord
from batchgen_beam.transforms.generate import Generate, Round
from batchgen_beam.transforms.host import HostHandle
from batchgen_beam.transforms.lane_names import lane_name
from batchgen_beam.transforms.lanes import PromptChunk, split_chunks
from batchgen_beam.transforms.wire import pack, unpack

__all__ = ["MAX_ROUNDS", "GenerateRounds", "NextRound", "check_rounds"]

MAX_ROUNDS = 4
"""Each round is three shuffles of the graph, whose buffers a Flink cluster has to have."""

TAIL = 0.5
"""Rows leave the first round when they fill this share of the engine; benchmarks/round_simulation.py compares."""

TAIL_SHRINK = 4
"""A later round begins with about a thin batch: it is over when it holds this many times fewer than the one before."""

Place = tuple[int, int]
"""A row's lane, and its rank in the plan."""


def check_rounds(rounds: int) -> None:
    """`OptionError` for a number of rounds that no run can have."""
    if not 1 <= rounds <= MAX_ROUNDS:
        raise OptionError(f"--rounds={rounds}: between 1 and {MAX_ROUNDS} rounds are supported")


class ExpectLength(beam.DoFn):
    """ContinuationRecord -> (row key text, expected remaining tokens); the row's move is judged on the way."""

    def __init__(self, handle: HostHandle) -> None:
        self._handle = handle

    def setup(self) -> None:
        """The context limit; the engine that the row has left is in this process, where the runner fuses steps."""
        self._host = self._handle.acquire()
        self._context_limit = self._host.model().context_limit

    def process(self, record: ContinuationRecord) -> Iterator[tuple[str, int]]:
        """See the class."""
        prompt, generated = len(record.prompt_ids), len(record.generated_ids)
        if generated:  # a row that has not begun has nothing to move
            self._host.judge_move(prompt + generated)
        yield record.key.text, expected_remaining(
            prompt=prompt, generated=generated, max_tokens=record.params.max_tokens, context_limit=self._context_limit)


class PlanLanes(beam.DoFn):
    """All rows of a round, as (row key text, expected remaining tokens) -> (row key text, Place)."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes

    def process(self, gathered: tuple[int, Iterable[tuple[str, int]]]) -> Iterator[tuple[str, Place]]:
        """See the class."""
        _, rows = gathered
        for rank, (key, lane) in enumerate(plan_round(rows, self._lanes).items()):
            yield key, (lane, rank)


def to_place(record: ContinuationRecord, plan: Mapping[str, Place]) -> tuple[str, tuple[int, bytes]]:
    """(lane, (rank, packed record))."""
    lane, rank = plan[record.key.text]
    return lane_name(lane), (rank, pack(record))


def in_plan_order(lane: tuple[str, Iterable[tuple[int, bytes]]]) -> Iterator[tuple[str, PromptChunk]]:
    """The rows of a lane in chunks, by rank, however the runner gathered them."""
    name, ranked = lane
    for chunk in split_chunks([unpack(packed) for _, packed in sorted(ranked)]):
        yield name, chunk


class NextRound(beam.PTransform):
    """ContinuationRecord -> (lane, PromptChunk), over `lanes` lanes."""

    def __init__(self, handle: HostHandle, lanes: int) -> None:
        super().__init__()
        self._handle = handle
        self._lanes = lanes

    def expand(self, continued: beam.PCollection) -> beam.PCollection:
        """See the class."""
        plan = (
            continued
            | "ExpectLength" >> beam.ParDo(ExpectLength(self._handle)).with_output_types(tuple[str, int])
            | "OneKey" >> beam.WithKeys(0).with_output_types(tuple[int, tuple[str, int]])
            | "AllRows" >> beam.GroupByKey()
            | "PlanLanes" >> beam.ParDo(PlanLanes(self._lanes)).with_output_types(tuple[str, Place]))
        return (
            continued
            | "ToPlace" >> beam.Map(to_place, AsDict(plan)).with_output_types(tuple[str, tuple[int, bytes]])
            | "ByLane" >> beam.GroupByKey()
            | "InPlanOrder" >> beam.FlatMap(in_plan_order).with_output_types(tuple[str, PromptChunk]))


class GenerateRounds(beam.PTransform):
    """(lane, PromptChunk) -> (row key text, Answer) in `rounds` rounds.

    The first has `lanes` lanes by key hash, each later one `slots`: a lane for each bundle that may run at once, since
    a runner that works off lanes one after another would pay a tail for each.
    """

    def __init__(self, handle: HostHandle, *, lanes: int, slots: int, rounds: int) -> None:
        super().__init__()
        self._handle = handle
        self._lanes = lanes
        self._later_lanes = min(lanes, slots)
        self._rounds = rounds

    def expand(self, chunks: beam.PCollection) -> beam.PCollection:
        """See the class."""
        answers = []
        for number in range(1, self._rounds + 1):
            generated = chunks | f"Round{number}" >> Generate(self._handle, self._round(number))
            answers.append(generated.answers)
            if number < self._rounds:
                chunks = generated.continued | f"Next{number}" >> NextRound(self._handle, self._later_lanes)
        return answers | "Answers" >> beam.Flatten()

    def _round(self, number: int) -> Round:
        tail = None if number == self._rounds else TAIL / TAIL_SHRINK ** (number - 1)
        return Round(number=number, hashed=self._lanes if number == 1 else None, tail=tail)
