"""The job as a Beam graph.

Owns the wiring of the transforms and nothing else: no flag is read and no file is opened here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import apache_beam as beam

from batchgen_beam.settings import InputColumns
from batchgen_beam.storage.inputs import InputPlan
from batchgen_beam.storage.unit_records import UnitRecords
from batchgen_beam.transforms.finish import CountRepeatedIds, FinishRun
from batchgen_beam.transforms.generate import Generate, Round
from batchgen_beam.transforms.host import HostHandle
from batchgen_beam.transforms.lanes import ToLanes
from batchgen_beam.transforms.prepare import Prepare
from batchgen_beam.transforms.publish import Publish
from batchgen_beam.transforms.read import ReadShards, Reuse
from batchgen_beam.transforms.route import RouteToUnits

__all__ = ["JobSpec", "build_job"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """All that the graph depends on.

    `facts` go into the run's report; `content` is the digest of its content print; `clock` gives seconds since the
    epoch.
    """

    plan: InputPlan
    columns: InputColumns
    output: str
    run: str
    model: str
    lanes: int
    handle: HostHandle
    facts: Mapping[str, object]
    content: str
    clock: Callable[[], float]


def build_job(pipeline: beam.Pipeline, job: JobSpec) -> beam.PCollection:
    """Add the job to a pipeline; the result is one `RunTotals`, once `_SUCCESS` stands."""
    records = UnitRecords(output=job.output, content=job.content, model=job.model, run=job.run)
    read = pipeline | "ReadShards" >> ReadShards(job.plan, job.columns, reuse=Reuse(records, job.handle))
    prepared = read.rows | "Prepare" >> Prepare(job.handle)
    chunks = prepared.prompts | "ToLanes" >> ToLanes(job.lanes)
    generated = chunks | "Generate" >> Generate(job.handle, Round(hashed=job.lanes))
    keyed = (read.placements, prepared.failures, generated.answers)
    routed = keyed | "RouteToUnits" >> RouteToUnits(rows=job.plan.rows)
    published = (read.manifests, routed.placed) | "Publish" >> Publish(records)
    units = (published, read.skipped) | "Units" >> beam.Flatten()
    repeated = (read.placements, read.skipped_ids) | "CountRepeatedIds" >> CountRepeatedIds()
    finish = FinishRun(job.output, job.run, job.facts, rows=job.plan.rows, clock=job.clock,
                       content=job.content)
    return (units, routed.totals, repeated) | "Finish" >> finish
