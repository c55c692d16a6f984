"""An Airflow DAG that answers each day's new prompts: the same command every day, on an input that grows.

The command computes what is new or was edited and leaves published units alone, so the task has nothing to remember,
and a retry, a backfill or a second run costs only what is missing.  Copy this file into the DAGs folder.  Airflow's
Variables say where things are: `batchgen_input` (a pattern that holds all days), `batchgen_output`, `batchgen_model`,
and where they are needed `batchgen_flags` (more flags) and `batchgen_command` (the path of `batchgen-beam`, which has
an environment of its own).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow.providers.standard.hooks.subprocess import SubprocessHook
from airflow.sdk import DAG, BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

OK, USER_ERROR, ROWS_FAILED, INTERRUPTED = 0, 2, 3, 130
"""Exit codes of `batchgen-beam run`."""


class BatchgenRun(BaseOperator):
    """`batchgen-beam run`: rows that failed are a warning, a mistake in the command fails at once, all else is retried.

    The task's value is the exit code, so that a later task may look at the failures only where there are some.
    """

    template_fields: Sequence[str] = ("command", "flags")

    def __init__(self, *, command: str, flags: str, **others: Any) -> None:
        super().__init__(**others)
        self.command = command
        self.flags = flags
        self.process = SubprocessHook()

    def execute(self, context: Any) -> int:
        """Run it to its end; its output goes to the task's log."""
        line = [*shlex.split(self.command), "run", *shlex.split(self.flags)]
        try:
            code = self.process.run_command(line).exit_code
        except FileNotFoundError as error:
            raise AirflowFailException(f"there is no command {line[0]}: set the Variable batchgen_command") from error
        if code == ROWS_FAILED:
            self.log.warning("finished, but some rows failed: see failures/ in the output")
        elif code == USER_ERROR:
            raise AirflowFailException("the command or its input has to be corrected: see the last line of the log")
        elif code == INTERRUPTED:
            raise AirflowException("interrupted; the next try goes on where this one stopped")
        elif code != OK:
            raise AirflowException(f"stopped with exit code {code}; the next try goes on where this one stopped")
        return code

    def on_kill(self) -> None:
        """A task that Airflow ends: the command stores what it has and leaves within 20 seconds."""
        with suppress(ProcessLookupError):  # it has ended
            self.process.send_sigterm()


COMMAND = "{{ var.value.get('batchgen_command', 'batchgen-beam') }}"
FLAGS = ("--input '{{ var.value.batchgen_input }}' --output '{{ var.value.batchgen_output }}' "
         "--model '{{ var.value.batchgen_model }}' {{ var.value.get('batchgen_flags', '') }}")

with DAG(
    "batchgen_daily",
    schedule="0 3 * * *",
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 3, "retry_delay": timedelta(minutes=5)},
    tags=["batchgen"],
):
    BatchgenRun(task_id="answer_new_prompts", command=COMMAND, flags=FLAGS)
