"""One run from flags to its report.

Owns the order of events around Beam: checks, the engine loaded early where it lives in this process, progress, the
final report.  Does not know what the checks are (`checks`) nor the graph (`build`).
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TextIO

import apache_beam as beam
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import SetupOptions

from batchgen_beam.pipelines.build import JobSpec, build_job
from batchgen_beam.pipelines.checks import CheckedRun, check_run
from batchgen_beam.pipelines.options import BatchgenOptions
from batchgen_beam.pipelines.placement import ask_runner
from batchgen_beam.pipelines.progress import ProgressDisplay
from batchgen_beam.pipelines.request import RunRequest
from batchgen_beam.pipelines.runners import RunnerFacts, check_runner_options, pin_runner
from batchgen_beam.pipelines.summary import show_summary
from batchgen_beam.pipelines.worker_faults import user_error_in
from batchgen_beam.storage.journal import Journal
from batchgen_beam.storage.run_files import read_report, start_run, write_engine_figures
from batchgen_beam.transforms.host import HostHandle
from batchgen_beam.transforms.leaving import HOLDERS
from batchgen_beam.transforms.progress_files import progress_folder, read_samples, total
from batchgen_beam.transforms.recording import JournalPlace
from batchgen_beam.transforms.worker_plugin import PLUGIN

__all__ = ["Streams", "run_job"]


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
    place = JournalPlace(journal=journal, run=run, settings=request.journal,
                         known=frozenset(part.path for part in journal.parts()))
    handle = HostHandle(replace(checked.host, journal=place))
    if runner.in_launcher:
        _load(handle, streams)
    start_run(request.output, checked.fingerprint, new_fingerprint=request.new_fingerprint)
    job = _job(request, runner, checked, handle, run, now)
    display = ProgressDisplay(progress_folder(request.output, run), rows=job.plan.rows,
                              interval=request.progress_interval, stream=streams.err)
    try:
        report = _run_pipeline(options, job, display)
    finally:
        _leave_rows(streams)
    return _report(job, report, display, streams)


def _leave_rows(streams: Streams) -> None:
    """Whatever ended the job: answers and rows under way in this process are kept for the next run."""
    try:
        HOLDERS.suspend_all()
    except (OSError, RuntimeError) as error:
        streams.note(f"rows under way could not be saved, the next run computes them again: {error}")


def _load(handle: HostHandle, streams: Streams) -> None:
    """Load the engine that the steps will find in this process."""
    streams.note("loading the model")
    engine = handle.acquire().engine()
    streams.note(f"model loaded in {engine.load_seconds:.1f} s")
    longest, limit = engine.loaded.longest_row, engine.loaded.context_limit
    if longest < limit:
        streams.note(f"the KV memory holds {longest} tokens of one row, the context limit is {limit}: rows that may "
                     "grow longer fail as CAPACITY_EXCEEDED; raise --kv-memory, or lower --max-tokens or --max-context")


def _job(request: RunRequest, runner: RunnerFacts, checked: CheckedRun, handle: HostHandle, run: str,
         now: datetime) -> JobSpec:
    facts: Mapping[str, object] = {
        "started": now.isoformat(timespec="seconds"),
        "inputs": list(request.inputs),
        "model": _model_name(request.model),
        "content_print": {"digest": checked.fingerprint.digest, **dict(checked.fingerprint.facts)},
        "runner": runner.name,
        "lanes": checked.lanes,
        "not_applied": list(checked.not_applied),
    }
    return JobSpec(plan=checked.plan, columns=request.columns, output=request.output, run=run,
                   model=_model_name(request.model), lanes=checked.lanes, handle=handle, facts=facts,
                   content=checked.fingerprint.digest, clock=time.time)


def _model_name(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2]


def _run_pipeline(options: BatchgenOptions, job: JobSpec, display: ProgressDisplay) -> dict[str, Any]:
    """Run the job to its end; gives its report."""
    setup = options.view_as(SetupOptions)
    setup.save_main_session = False
    setup.beam_plugins = [*(setup.beam_plugins or ()), PLUGIN]
    with display:
        try:
            pipeline = beam.Pipeline(options=options)
            build_job(pipeline, job)
            pipeline.run().wait_until_finish()
        except RuntimeError as error:
            mistake = user_error_in(error)
            if mistake is not None:
                raise mistake from error
            raise
        report = read_report(job.output, job.run)
        display.settle(report["counts"])
    return report


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
