"""Which Beam runners a run may use, and what they declare about themselves.

Owns the pinning of local runs to the FnApiRunner and the number of worker slots.  Does not know what a run does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from apache_beam.options.pipeline_options import (
    DirectOptions,
    FlinkRunnerOptions,
    PipelineOptions,
    PortableOptions,
    SparkRunnerOptions,
    StandardOptions,
    WorkerOptions,
)
from apache_beam.options.pipeline_options_validator import PipelineOptionsValidator
from apache_beam.runners.runner import create_runner

from batchgen_beam.errors import OptionError

__all__ = ["LOCAL", "RunnerFacts", "check_runner_options", "pin_runner"]

LOCAL = "FnApiRunner"
_PINNED = ("DirectRunner", "SwitchingDirectRunner")
_REFUSED = ("BundleBasedDirectRunner", "TestDirectRunner", "InteractiveRunner")
_LAUNCHER_PROCESS = ("in_memory", "multi_threading")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerFacts:
    """`slots`: bundles that may run at once.  `processes`: worker processes on one machine, each with its engine.

    `in_launcher`: the engine lives in the launcher's own process, so it can be loaded before Beam starts.
    `on_launcher_machine`: workers see the launcher's files.  `note`: one line for the user where another runner was
    chosen than named.
    """

    name: str
    slots: int
    processes: int
    in_launcher: bool
    on_launcher_machine: bool
    note: str | None = None


def pin_runner(options: PipelineOptions) -> RunnerFacts:
    """Choose the runner and set it in `options`.

    Beam's DirectRunner picks one of three runners for each pipeline and one of them drops rows in some cases; here it
    always means the FnApiRunner.  Raises `OptionError` for runners that are unknown or not supported.
    """
    standard = options.view_as(StandardOptions)
    asked = _known(standard.runner or "DirectRunner")
    if asked in _REFUSED:
        raise OptionError(f"--runner={asked} is not supported: it does not run stateful steps reliably; "
                          f"use --runner={LOCAL}")
    if standard.streaming:
        raise OptionError("--streaming is not supported: inputs are finite files")
    note = None
    if asked in _PINNED:
        note = f"runner: {asked} means {LOCAL} here" if standard.runner else f"runner: {LOCAL}"
        standard.runner = asked = LOCAL
    if asked == LOCAL:
        return _local(options, note)
    return RunnerFacts(name=asked, slots=_remote_slots(options), processes=1, in_launcher=False,
                       on_launcher_machine=_runs_here(asked, options), note=note)


def check_runner_options(options: PipelineOptions) -> None:
    """Refuse, with an `OptionError` in Beam's words, what the chosen runner will refuse once the job is built."""
    name = options.view_as(StandardOptions).runner
    try:
        complaints = PipelineOptionsValidator(options, create_runner(name)).validate()
    except (ValueError, ImportError) as error:
        raise OptionError(f"--runner={name} can't be used here: {error}") from error
    if complaints:
        raise OptionError(f"--runner={name}: {' '.join(str(complaint) for complaint in complaints)}")


def _known(name: str) -> str:
    """The usual spelling of a runner's name, as Beam takes it in any case and with or without `Runner`."""
    names: dict[str, str] = {known.lower(): known for known in StandardOptions.KNOWN_RUNNER_NAMES}
    short = name.rpartition(".")[2].lower()
    found = names.get(short) or names.get(f"{short}runner")
    if found is not None:
        return found
    try:
        create_runner(name)
    except (ValueError, ImportError, AttributeError, TypeError) as error:
        known = ", ".join(known for known in names.values() if known not in _REFUSED)
        raise OptionError(f"--runner={name} is no runner; use one of {known}") from error
    return name.rpartition(".")[2]


def _local(options: PipelineOptions, note: str | None) -> RunnerFacts:
    direct = options.view_as(DirectOptions)
    if direct.direct_num_workers < 0:
        raise OptionError(f"--direct_num_workers must be at least 0, got {direct.direct_num_workers}")
    in_launcher = direct.direct_running_mode in _LAUNCHER_PROCESS
    workers = direct.direct_num_workers or os.cpu_count() or 1
    return RunnerFacts(name=LOCAL, slots=workers, processes=1 if in_launcher else workers, in_launcher=in_launcher,
                       on_launcher_machine=True, note=note)


def _runs_here(name: str, options: PipelineOptions) -> bool:
    """Whether workers run beside the launcher: where the user says so, or as Beam decides where nothing is said."""
    environment = options.view_as(PortableOptions).environment_type
    if environment:
        return str(environment).upper() == "LOOPBACK"
    if name == "FlinkRunner":
        return options.view_as(FlinkRunnerOptions).flink_master in ("[local]", "[auto]")
    if name == "SparkRunner":
        return str(options.view_as(SparkRunnerOptions).spark_master_url).startswith("local")
    return name == "PrismRunner"


def _remote_slots(options: PipelineOptions) -> int:
    workers = options.view_as(WorkerOptions)
    declared = (options.view_as(FlinkRunnerOptions).parallelism, workers.max_num_workers, workers.num_workers,
                _sdk_worker_parallelism(options))
    return max((value for value in declared if value and value > 0), default=1)


def _sdk_worker_parallelism(options: PipelineOptions) -> int:
    """Beam keeps the words of this flag as they are."""
    given = options.view_as(PortableOptions).sdk_worker_parallelism
    try:
        return int(given)
    except ValueError:
        raise OptionError(f"--sdk_worker_parallelism must be a number, got {given!r}") from None
