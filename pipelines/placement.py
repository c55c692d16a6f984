"""What a run asks of the machines that run it, in the words of its runner.

Owns what each runner has to be told beside the hints of the graph.  Does not know the graph.
"""

from __future__ import annotations

from apache_beam.options.pipeline_options import DebugOptions, PipelineOptions

from batchgen_beam.pipelines.runners import RunnerFacts
from batchgen_beam.settings import WorkerNeeds

__all__ = ["ONE_PROCESS", "ask_runner"]

ONE_PROCESS = "no_use_multiple_sdk_containers"
"""Dataflow starts one worker process per CPU of a machine unless told so: each would load its own engine."""

_HEEDING = "DataflowRunner"


def ask_runner(options: PipelineOptions, runner: RunnerFacts, needs: WorkerNeeds) -> str | None:
    """Set in `options` what the engine needs of the runner; one line for the user where the runner heeds no hints."""
    if runner.name == _HEEDING:
        options.view_as(DebugOptions).add_experiment(ONE_PROCESS)
        return None
    if needs.hints():
        return (f"--accelerator and --worker-ram are hints that only {_HEEDING} follows; {runner.name} takes its "
                "workers as they are")
    return None
