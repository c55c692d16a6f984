"""One run from flags to its report.

Owns the order of events around Beam: checks, the engine loaded early where it lives in this process, progress, the
final report.  Does not know what the checks are (`checks`) nor the graph (`build`).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, TextIO

import apache_beam as beam
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import SetupOptions
from apache_beam.runners.runner import PipelineResult

from batchgen_beam.pipelines.build import JobSpec, build_job, build_pass
from batchgen_beam.pipelines.checks import CheckedRun, check_run
from batchgen_beam.pipelines.options import BatchgenOptions
from batchgen_beam.pipelines.placement import ask_runner
from batchgen_beam.pipelines.progress import ProgressDisplay
from batchgen_beam.pipelines.request import RunRequest
from batchgen_beam.pipelines.runners import LOCAL, RunnerFacts, check_runner_options, pin_runner
from batchgen_beam.pipelines.summary import show_summary
from batchgen_beam.pipelines.worker_faults import user_error_in
from batchgen_beam.storage.inputs import InputPlan, pieces_over, split_plan
from batchgen_beam.storage.journal import Journal, Part
from batchgen_beam.storage.run_files import (
    read_fingerprint,
    read_passes,
    read_report,
    start_run,
    write_engine_figures,
)
from batchgen_beam.storage.unit_records import recorded_names
from batchgen_beam.transforms.host import HostHandle, ProcessHost
from batchgen_beam.transforms.leaving import HOLDERS
from batchgen_beam.transforms.progress_files import progress_folder, read_samples, total
from batchgen_beam.transforms.recording import JournalPlace
from batchgen_beam.transforms.worker_plugin import PLUGIN

__all__ = ["Streams", "run_job"]

PASS_ROWS = 200_000
"""So many rows the local runner takes at once, for it holds all of them in memory at every step."""


@dataclass(frozen=True, slots=True)
class Streams:
    """Where results are told (`out`) and where notes and progress go (`err`)."""

    out: TextIO
    err: TextIO

    def note(self, text: str) -> None:
        """One line beside the results."""
        self.err.write(text + "\n")
        self.err.flush()


def run_job(options: BatchgenOptions, streams: Streams) -> int:
    """Run the main job; returns how many rows failed.

    Raises `UserError` where something is refused, before Beam starts or by a worker, `FatalError` or Beam's
    `RuntimeError` where the job stopped.  An interrupt may come out as any of them, or as `KeyboardInterrupt`.
    """
    request = RunRequest.of(options)
    FileSystems.set_options(options)  # as Beam does in the pipeline and in each worker: the checks read stores before
    runner = pin_runner(options)
    streams.note(f"checking input {' '.join(request.inputs)} and model {request.model}")
    now = datetime.now(UTC)
    run = f"{now:%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex[:8]}"
    checked = check_run(request, runner, now=now, progress=progress_folder(request.output, run))
    check_runner_options(options)
    for line in filter(None, (runner.note, ask_runner(options, runner, request.needs), *checked.plan.warnings)):
        streams.note(line)
    if checked.not_applied:
        streams.note(f"the model's generation_config.json sets {', '.join(checked.not_applied)}: without effect here")
    journal = Journal.of(request.output, checked.fingerprint.digest)
    parts = tuple(journal.parts())
    place = JournalPlace(journal=journal, run=run, settings=request.journal, retry=request.retry,
                         known=frozenset(part.path for part in parts))
    handle = HostHandle(replace(checked.host, journal=place))
    host = handle.acquire() if runner.in_launcher else None  # held to the end: all passes share its engine
    if host is not None and not parts and not _has_units(request.output, checked):
        _load(host, streams)
    start_run(request.output, checked.fingerprint, new_fingerprint=request.new_fingerprint)
    job = _job(request, runner, checked, handle, place, parts, now)
    plans = split_plan(job.plan, PASS_ROWS) if runner.name == LOCAL else []
    if len(plans) > 1:
        streams.note(f"the input is done in {len(plans)} passes of about {PASS_ROWS} rows, which the local runner "
                     "holds in memory, then looked through once more")
    for uri, count in pieces_over(job.plan, PASS_ROWS) if runner.name == LOCAL else ():
        streams.note(f"{uri} holds about {count} rows in one piece, all of which the local runner holds in memory; "
                     "smaller files or row groups need less")
    display = ProgressDisplay(progress_folder(request.output, run), rows=job.plan.rows,
                              interval=request.progress_interval, stream=streams.err)
    try:
        report = _run_pipelines(options, job, plans, display)
    finally:
        _leave_rows(streams)
    return _report(job, report, display, streams)


def _leave_rows(streams: Streams) -> None:
    """Whatever ended the job: answers and rows under way in this process are kept for the next run."""
    try:
        HOLDERS.suspend_all()
    except (OSError, RuntimeError) as error:
        streams.note(f"rows under way could not be saved, the next run computes them again: {error}")


def _has_units(output: str, checked: CheckedRun) -> bool:
    """Whether units may stay as they are, perhaps so many that the model is not needed at all."""
    return read_fingerprint(output) == checked.fingerprint and bool(recorded_names(output))


def _load(host: ProcessHost, streams: Streams) -> None:
    """Load the engine that the steps will find in this process."""
    streams.note("loading the model")
    engine = host.engine()
    streams.note(f"model loaded in {engine.load_seconds:.1f} s, {engine.loaded.kernels} kernels")
    if engine.loaded.tail is not None:
        streams.note(engine.loaded.tail.verdict)
    longest, limit = engine.loaded.longest_row, engine.loaded.context_limit
    if longest < limit:
        streams.note(f"the KV memory holds {longest} tokens of one row, the context limit is {limit}: rows that may "
                     "grow longer fail as CAPACITY_EXCEEDED; raise --kv-memory, or lower --max-tokens or --max-context")


def _job(request: RunRequest, runner: RunnerFacts, checked: CheckedRun, handle: HostHandle, place: JournalPlace,
         parts: tuple[Part, ...], now: datetime) -> JobSpec:
    facts: Mapping[str, object] = {
        "started": now.isoformat(timespec="seconds"),
        "inputs": list(request.inputs),
        "model": _model_name(request.model),
        "content_print": {"digest": checked.fingerprint.digest, **dict(checked.fingerprint.facts)},
        "runner": runner.name,
        "lanes": checked.lanes,
        "rounds": request.rounds,
        "not_applied": list(checked.not_applied),
    }
    return JobSpec(plan=checked.plan, columns=request.columns, output=request.output, run=place.run,
                   model=_model_name(request.model), lanes=checked.lanes, rounds=request.rounds,
                   slots=runner.slots, handle=handle, facts=facts,
                   content=checked.fingerprint.digest, clock=time.time, journal=place.journal, parts=parts,
                   retry=request.retry, compact_seconds=request.journal.compact_seconds)


def _model_name(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2]


def _run_pipelines(options: BatchgenOptions, job: JobSpec, plans: Sequence[InputPlan],
                   display: ProgressDisplay) -> dict[str, Any]:
    """Run the job to its end, after passes over the parts of its input where there are several; gives its report."""
    setup = options.view_as(SetupOptions)
    setup.save_main_session = False
    setup.beam_plugins = [*(setup.beam_plugins or ()), PLUGIN]
    with display:
        passes = None
        if len(plans) > 1:
            for number, plan in enumerate(plans, 1):
                _run(options, partial(build_pass, job=replace(job, plan=plan), number=number))
            passes = read_passes(job.output, job.run, len(plans))
        _run(options, partial(build_job, job=job, passes=passes))
        report = read_report(job.output, job.run)
        display.settle(report["counts"])
    return report


def _run(options: BatchgenOptions, build: Callable[[beam.Pipeline], beam.PCollection]) -> None:
    """One pipeline to its end; a mistake of the user that a worker met is raised as such."""
    try:
        pipeline = beam.Pipeline(options=options)
        build(pipeline)
        _wait(pipeline.run())
    except RuntimeError as error:
        mistake = user_error_in(error)
        if mistake is not None:
            raise mistake from error
        raise


def _wait(result: PipelineResult) -> None:
    """To the end of the job.  An interrupt cancels the job too: left alone, a remote one would keep its workers.

    Beam's job server for Flink takes it, and yet lets the Flink job go on: it is cancelled at Flink, or does no harm.
    """
    try:
        result.wait_until_finish()
    except KeyboardInterrupt:
        result.cancel()
        raise


def _report(job: JobSpec, report: Mapping[str, Any], display: ProgressDisplay, streams: Streams) -> int:
    readings = read_samples(progress_folder(job.output, job.run))
    if readings.unreadable:
        streams.note(f"{readings.unreadable} progress files can't be read; the engine's figures leave them out")
    figures = total(readings.samples)
    write_engine_figures(job.output, job.run, {
        **figures.as_facts(), "unreadable_samples": readings.unreadable, "timeline": display.timeline.as_facts()})
    with suppress(BrokenPipeError):  # nobody reads the summary; the job is done all the same
        show_summary(report, figures, output=job.output, stream=streams.out)
    failed: int = report["counts"]["failed"]
    return failed
