"""Everything that is checked before Beam starts, from the input's footers to the output's content print.

Owns the order of the checks: cheap ones first, nothing of the output touched before all of them hold.  Does not know
the graph or how progress is shown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from batchgen_beam.pipelines.request import RunRequest
from batchgen_beam.pipelines.runners import RunnerFacts
from batchgen_beam.records import Fingerprint
from batchgen_beam.storage.inputs import InputPlan, plan_input
from batchgen_beam.storage.parquet_input import read_footer
from batchgen_beam.storage.run_files import check_output, read_fingerprint
from batchgen_beam.text.template import missing_template
from batchgen_beam.transforms.host import HostSettings
from batchgen_beam.transforms.lanes import lane_count
from batchgen_beam.transforms.model_folder import ModelFolder
from batchgen_beam.transforms.prints import TEMPLATE_CLOCK, content_print
from batchgen_beam.weights.checkpoint import check_checkpoint

__all__ = ["CheckedRun", "check_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """A run that may start."""

    plan: InputPlan
    fingerprint: Fingerprint
    host: HostSettings
    lanes: int


def check_run(request: RunRequest, runner: RunnerFacts, *, now: datetime, progress: str) -> CheckedRun:
    """Check input, model and output; a `UserError` names the thing and the remedy.

    `now` is what chat templates that ask for the date are told, unless the output folder was begun on another day.
    """
    plan = plan_input(request.inputs, request.columns, limit=request.limit)
    lanes = lane_count(request.lanes, slots=runner.slots, rows=plan.rows, capacity=request.engine.max_rows)
    clock = _template_clock(request.output, now)
    host = HostSettings(
        model=request.model, model_cache=request.model_cache, engine=request.engine, defaults=request.defaults,
        content_print="", clock=clock, template_file=request.chat_template, kv_memory=request.kv_memory,
        processes=runner.processes, progress=progress, progress_interval=request.progress_interval)
    model = host.open_model()
    check_checkpoint(model.path)
    model.preparer(request.defaults)
    _check_messages(plan, request, model)
    fingerprint = content_print(model, request.defaults, dtype=request.engine.dtype, clock=clock.date().isoformat())
    if not request.new_fingerprint:
        check_output(request.output, fingerprint)
    return CheckedRun(plan=plan, fingerprint=fingerprint, lanes=lanes,
                      host=replace(host, content_print=fingerprint.digest))


def _template_clock(output: str, now: datetime) -> datetime:
    previous = read_fingerprint(output)
    date = None if previous is None else dict(previous.facts).get(TEMPLATE_CLOCK)
    begun = now if date is None else datetime.fromisoformat(date)
    return datetime(begun.year, begun.month, begun.day, tzinfo=UTC)


def _check_messages(plan: InputPlan, request: RunRequest, model: ModelFolder) -> None:
    """A model without chat template can't answer a column of messages: refuse before anything runs."""
    column = request.columns.messages
    if model.template is None and any(
            file.rows is not None and column in read_footer(file.uri, request.columns).schema.names
            for file in plan.files):
        raise missing_template(column=column, folder=model.path)
