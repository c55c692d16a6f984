"""One run from flags to its report.

Owns the order of events around Beam: checks, the engine loaded early where it lives in this process, progress, the
final report.  Does not know what the checks are (`checks`) nor the graph (`build`).
"""

from __future__ import annotations

import logging
import signal
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NoReturn, Self, TextIO

import apache_beam as beam
from apache_beam.options.pipeline_options import SetupOptions

from batchgen_beam.pipelines.build import JobSpec, build_job
from batchgen_beam.pipelines.checks import CheckedRun, check_run
from batchgen_beam.pipelines.options import BatchgenOptions
from batchgen_beam.pipelines.progress import ProgressDisplay
from batchgen_beam.pipelines.request import RunRequest
from batchgen_beam.pipelines.runners import RunnerFacts, pin_runner
from batchgen_beam.pipelines.summary import show_summary
from batchgen_beam.storage.run_files import read_report, start_run, write_engine_figures
from batchgen_beam.transforms.host import HostHandle
from batchgen_beam.transforms.progress_files import progress_folder, read_samples, total

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

    Raises `UserError` before Beam starts where something is refused, `FatalError` or Beam's `RuntimeError` where the
    job stopped, `KeyboardInterrupt` when it was interrupted.
    """
    request = RunRequest.of(options)
    runner = pin_runner(options)
    streams.note(f"checking input {' '.join(request.inputs)} and model {request.model}")
    now = datetime.now(UTC)
    run = f"{now:%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex[:8]}"
    checked = check_run(request, runner, now=now, progress=progress_folder(request.output, run))
    for line in filter(None, (runner.note, *checked.plan.warnings)):
        streams.note(line)
    handle = HostHandle(checked.host)
    if runner.in_launcher:
        streams.note("loading the model")
        streams.note(f"model loaded in {handle.acquire().engine().load_seconds:.1f} s")
    start_run(request.output, checked.fingerprint, new_fingerprint=request.new_fingerprint)
    _run_pipeline(options, _job(request, runner, checked, handle, run, now), streams)
    return _report(request, run, handle, streams)


def _job(request: RunRequest, runner: RunnerFacts, checked: CheckedRun, handle: HostHandle, run: str,
         now: datetime) -> JobSpec:
    facts: Mapping[str, object] = {
        "started": now.isoformat(timespec="seconds"),
        "inputs": list(request.inputs),
        "model": _model_name(request.model),
        "content_print": {"digest": checked.fingerprint.digest, **dict(checked.fingerprint.facts)},
        "runner": runner.name,
        "lanes": checked.lanes,
    }
    return JobSpec(plan=checked.plan, columns=request.columns, output=request.output, run=run,
                   model=_model_name(request.model), lanes=checked.lanes, handle=handle, facts=facts, clock=time.time)


def _model_name(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2]


def _run_pipeline(options: BatchgenOptions, job: JobSpec, streams: Streams) -> None:
    options.view_as(SetupOptions).save_main_session = False
    pipeline = beam.Pipeline(options=options)
    build_job(pipeline, job)
    settings = job.handle.settings
    assert settings.progress is not None
    display = ProgressDisplay(settings.progress, rows=job.plan.rows, interval=settings.progress_interval,
                              stream=streams.err)
    with _Interrupts() as interrupts, display:
        try:
            pipeline.run().wait_until_finish()
        except RuntimeError as error:
            if interrupts.seen:
                raise KeyboardInterrupt from error
            raise


class _Interrupts:
    """While it is open, Ctrl-C and a termination signal both interrupt the main thread, and are remembered.

    A local runner works in the main thread and reports the interrupt as the failure of some step.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.seen = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._interrupt) for number in self.SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _interrupt(self, number: int, frame: object) -> NoReturn:
        self.seen = True
        logging.disable()
        raise KeyboardInterrupt


def _report(request: RunRequest, run: str, handle: HostHandle, streams: Streams) -> int:
    assert handle.settings.progress is not None
    figures = total(read_samples(handle.settings.progress))
    write_engine_figures(request.output, run, figures.as_facts())
    report = read_report(request.output, run)
    return show_summary(report, figures, output=request.output, stream=streams.out)
