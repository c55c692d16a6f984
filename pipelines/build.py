"""The job as a Beam graph.

Owns the wiring of the transforms and nothing else: no flag is read and no file is opened here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import apache_beam as beam

from batchgen_beam.errors import ErrorCode
from batchgen_beam.settings import InputColumns, JournalSettings
from batchgen_beam.storage.inputs import InputPlan
from batchgen_beam.storage.journal import Journal, Part
from batchgen_beam.storage.totals import RunTotals
from batchgen_beam.storage.unit_records import UnitRecords
from batchgen_beam.transforms.compact import CompactJournal
from batchgen_beam.transforms.finish import CountRepeatedIds, FinishPass, FinishRun
from batchgen_beam.transforms.host import HostHandle
from batchgen_beam.transforms.lanes import ToLanes
from batchgen_beam.transforms.prepare import Prepare
from batchgen_beam.transforms.publish import Publish
from batchgen_beam.transforms.read import ReadOutputs, ReadShards, Reuse
from batchgen_beam.transforms.rounds import GenerateRounds
from batchgen_beam.transforms.route import RouteToUnits
from batchgen_beam.transforms.skip_done import SkipDone

__all__ = ["JobSpec", "build_job", "build_pass"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """All that the graph depends on.

    `facts` go into the run's report; `content` is the digest of its content print; `clock` gives seconds since the
    epoch.  `parts` are those of the journal that the graph looks into; failures of the codes `retry` are tried again.
    Rows run in `rounds` rounds, the first over `lanes` lanes, the others over one for each of the runner's `slots`.
    Parts of ended runs are merged once they are `compact_seconds` old.
    """

    plan: InputPlan
    columns: InputColumns
    output: str
    run: str
    model: str
    lanes: int
    rounds: int
    slots: int
    handle: HostHandle
    facts: Mapping[str, object]
    content: str
    clock: Callable[[], float]
    journal: Journal
    parts: tuple[Part, ...] = ()
    retry: frozenset[ErrorCode] = frozenset()
    compact_seconds: float = JournalSettings().compact_seconds


class _Answered(NamedTuple):
    """What was read, a UnitReport of every unit, and RunTotals of what the units do not count."""

    read: ReadOutputs
    units: beam.PCollection
    totals: tuple[beam.PCollection, ...]


def build_job(pipeline: beam.Pipeline, job: JobSpec, *, passes: RunTotals | None = None) -> beam.PCollection:
    """Add the job to a pipeline; the result is one `RunTotals`, once `_SUCCESS` stands.  Then the journal is compacted.

    `passes`: what passes over the parts of the same input have come to (None: there were none).
    """
    answered = _answer(pipeline, job, again=passes is not None)
    repeated = (answered.read.placements, answered.read.skipped_ids) | "CountRepeatedIds" >> CountRepeatedIds()
    before = pipeline | "Passes" >> beam.Create([passes or RunTotals()])
    finish = FinishRun(job.output, job.run, job.facts, rows=job.plan.rows, clock=job.clock, content=job.content)
    finished = (answered.units, *answered.totals, repeated, before) | "Finish" >> finish
    compact = CompactJournal(job.output, job.journal, job.run, compact_seconds=job.compact_seconds, clock=job.clock)
    _ = finished | "CompactJournal" >> compact
    return finished


def build_pass(pipeline: beam.Pipeline, job: JobSpec, number: int) -> beam.PCollection:
    """The same without an end: the units of a part of the input are published, and what they do not count is stored.

    A runner that holds all collections in memory takes a large input so; a job over the whole input ends the run.
    """
    answered = _answer(pipeline, job, again=False)
    return answered.totals | "FinishPass" >> FinishPass(job.output, job.run, number)


def _answer(pipeline: beam.Pipeline, job: JobSpec, *, again: bool) -> _Answered:
    """`again`: passes went before; their units stay, and no row shows as done for the second time."""
    records = UnitRecords(output=job.output, content=job.content, model=job.model, run=job.run, retry=job.retry,
                          own=again)
    reuse = Reuse(records, None if again else job.handle)
    read = pipeline | "ReadShards" >> ReadShards(job.plan, job.columns, reuse=reuse)
    done = _skip_done(read.rows, job)
    prepared = done.rows | "Prepare" >> Prepare(job.handle)
    engine_rows = (prepared.prompts, *done.resumed) | "EngineRows" >> beam.Flatten()
    chunks = engine_rows | "ToLanes" >> ToLanes(job.lanes)
    rounds = GenerateRounds(job.handle, lanes=job.lanes, slots=job.slots, rounds=job.rounds)
    generated = chunks | "Generate" >> rounds
    keyed = (read.placements, prepared.failures, generated, *done.answers)
    routed = keyed | "RouteToUnits" >> RouteToUnits(rows=job.plan.rows)
    published = (read.manifests, routed.placed) | "Publish" >> Publish(records)
    units = (published, read.skipped) | "Units" >> beam.Flatten()
    return _Answered(read, units, (routed.totals, *done.totals))


class _Done(NamedTuple):
    """`SkipOutputs` whose collections may be absent."""

    rows: beam.PCollection
    resumed: tuple[beam.PCollection, ...] = ()
    answers: tuple[beam.PCollection, ...] = ()
    totals: tuple[beam.PCollection, ...] = ()


def _skip_done(rows: beam.PCollection, job: JobSpec) -> _Done:
    if not job.parts:
        return _Done(rows)
    skip = SkipDone(job.journal, job.parts, job.handle, retry=job.retry, rows=job.plan.rows)
    outputs = rows | "SkipDone" >> skip
    return _Done(outputs.rows, (outputs.resumed,), (outputs.answers,), (outputs.totals,))
