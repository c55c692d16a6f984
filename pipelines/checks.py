"""Everything that is checked before Beam starts, from the input's footers to the output's content print.

Owns the order of the checks: cheap ones first, nothing of the output touched before all of them hold.  Does not know
the graph or how progress is shown.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from batchgen_beam.errors import OptionError, OutputError
from batchgen_beam.kernels.choice import refuse_kv_dtype
from batchgen_beam.pipelines.request import RunRequest
from batchgen_beam.pipelines.runners import LOCAL, RunnerFacts
from batchgen_beam.records import Fingerprint
from batchgen_beam.storage.files import join, normalise_uri
from batchgen_beam.storage.inputs import InputPlan, plan_input
from batchgen_beam.storage.run_files import FINGERPRINT_FILE, check_output, read_fingerprint
from batchgen_beam.storage.units import FAILURES, RESULTS
from batchgen_beam.text.template import TemplateText, missing_template
from batchgen_beam.transforms.host import HostSettings
from batchgen_beam.transforms.lanes import lane_count
from batchgen_beam.transforms.model_folder import ModelFolder, ModelSource
from batchgen_beam.transforms.model_shapes import model_shapes
from batchgen_beam.transforms.model_store import EVERYWHERE, IN_IMAGE, is_on_a_store, local_path
from batchgen_beam.transforms.prints import TEMPLATE_CLOCK, content_print
from batchgen_beam.transforms.rounds import check_rounds
from batchgen_beam.transforms.tail_processes import refuse_tail_processes
from batchgen_beam.weights.checkpoint import check_checkpoint

__all__ = ["CheckedRun", "check_run"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedRun:
    """A run that may start.  `not_applied`: settings of the model's authors that have no effect here."""

    plan: InputPlan
    fingerprint: Fingerprint
    host: HostSettings
    lanes: int
    not_applied: tuple[str, ...]


def check_run(request: RunRequest, runner: RunnerFacts, *, now: datetime, progress: str) -> CheckedRun:
    """Check input, model and output; a `UserError` names the thing and the remedy.

    `now` is what chat templates that ask for the date are told, unless the output folder was begun on another day.
    """
    _check_place(request.output)
    _check_reach(request, runner)
    check_rounds(request.rounds)
    plan = plan_input(request.inputs, request.columns, output=request.output, limit=request.limit)
    lanes = lane_count(request.lanes, slots=runner.slots, rows=plan.rows, capacity=request.engine.max_rows)
    source = ModelSource(model=request.model, model_cache=request.model_cache, template=_template(request),
                         clock=_template_clock(request.output, now), eos_ids=request.eos_ids)
    model = _open_model(source, request)
    _check_messages(plan, request, model)
    refuse_kv_dtype(request.engine.kv_dtype, model_shapes(model.config))
    refuse_tail_processes(request.engine, model.config)
    fingerprint = content_print(model, request.defaults, dtype=request.engine.dtype, kv_dtype=request.engine.kv_dtype,
                                clock=source.clock.date().isoformat())
    if not request.new_fingerprint:
        check_output(request.output, fingerprint)
    host = HostSettings(
        source=replace(source, content=Fingerprint.of(model.content())), engine=request.engine,
        defaults=request.defaults, content_print=fingerprint.digest, processes=runner.processes, progress=progress,
        progress_interval=request.progress_interval, needs=request.needs)
    return CheckedRun(plan=plan, fingerprint=fingerprint, lanes=lanes, host=host,
                      not_applied=model.defaults.unapplied)


def _check_place(output: str) -> None:
    """A local output must be a folder that can be written, or one that can be made."""
    uri = normalise_uri(output)
    if not uri.startswith("file://"):
        return
    path = Path(uri.removeprefix("file://"))
    there = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not there.is_dir():
        raise OutputError(f"output {output} can't be a folder: {there} is a file; choose another --output")
    for name in (RESULTS, FAILURES):
        if os.path.lexists(path / name) and not (path / name).is_dir():
            raise OutputError(f"output {output} can't be used: {path / name} is a file; choose another --output")
    if not os.access(there, os.W_OK | os.X_OK):
        raise OutputError(f"output {output} can't be written: no permission in {there}; choose another --output")


def _check_reach(request: RunRequest, runner: RunnerFacts) -> None:
    """Workers elsewhere do not have the launcher's files."""
    if runner.on_launcher_machine:
        return
    if not (is_on_a_store(request.model) or request.model.lower().startswith((EVERYWHERE, IN_IMAGE))):
        raise _out_of_reach(runner, "--model", request.model, f"--model={EVERYWHERE}/... for a path that is the same "
                            f"on every machine (a shared file system), --model={IN_IMAGE}/... for one in the workers' "
                            "image")
    for flag, path in (*(("--input", one) for one in request.inputs), ("--output", request.output)):
        if "://" not in path:
            raise _out_of_reach(runner, flag, path, f"{flag}={normalise_uri(path)} if that path is the same on every "
                                "machine (a shared file system)")


def _out_of_reach(runner: RunnerFacts, flag: str, path: str, instead: str) -> OptionError:
    return OptionError(
        f"--runner={runner.name} has workers on other machines, and {flag}={path} is a path of this one; copy it to a "
        f"store and give its URI (gs://, s3://), or write {instead}; or use --environment_type=LOOPBACK or "
        f"--runner={LOCAL}")


def _template(request: RunRequest) -> TemplateText | None:
    return None if request.chat_template is None else TemplateText.of_file(Path(request.chat_template))


def _open_model(source: ModelSource, request: RunRequest) -> ModelFolder:
    """The model, or its facts where the user gives them: then the workers check the model itself."""
    limit = request.engine.max_context
    if request.model_facts is not None:
        return source.open_facts(Path(request.model_facts), max_context=limit)
    path = local_path(request.model)
    if path is not None and request.model.lower().startswith(IN_IMAGE) and not path.exists():
        raise OptionError(f"--model={request.model} is in the workers' image, and this machine has no {path}: start "
                          f"the run in that image, or run `batchgen-beam inspect {path} --write-facts FOLDER` there "
                          "and give --model-facts=FOLDER here")
    model = source.open(max_context=limit)
    check_checkpoint(model.path)
    return model


def _template_clock(output: str, now: datetime) -> datetime:
    previous = read_fingerprint(output)
    date = None if previous is None else dict(previous.facts).get(TEMPLATE_CLOCK)
    try:
        begun = now if date is None else datetime.fromisoformat(date)
    except ValueError as error:
        raise OutputError(f"{join(output, FINGERPRINT_FILE)} is damaged ({TEMPLATE_CLOCK} {date!r} is no date); choose "
                          "another --output, or delete the file if the folder's answers may be replaced") from error
    return datetime(begun.year, begun.month, begun.day, tzinfo=UTC)


def _check_messages(plan: InputPlan, request: RunRequest, model: ModelFolder) -> None:
    """A model without chat template can't answer a column of messages: refuse before anything runs."""
    column = request.columns.messages
    if model.template is None and column in plan.columns:
        raise missing_template(column=column, folder=model.path)
