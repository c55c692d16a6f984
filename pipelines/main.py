"""The console script `batchgen-beam`: subcommands, and exceptions as exit codes.

Owns the exit codes: 0 done, 3 done with failed rows, 2 the user's mistake, 130 interrupted, 1 fatal.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from batchgen_beam.errors import OptionError, UserError
from batchgen_beam.pipelines.interrupts import INTERRUPTED, INTERRUPTED_MESSAGE, Interrupts

__all__ = ["COMMANDS", "FATAL", "INTERRUPTED", "OK", "ROWS_FAILED", "USER_ERROR", "main"]

OK = 0
FATAL = 1
USER_ERROR = 2
ROWS_FAILED = 3

COMMANDS = {
    "run": "answer every row of Parquet or JSONL files",
    "demo": "the same on the committed example rows, with a small real model",
    "plan": "memory, batches, time and cost of a model and a workload, on this machine or on one that is not here",
    "inspect": "what a model is, and whether it would run",
    "bench": "how fast a model runs on this machine, part by part",
}

_HELP = ("-h", "--help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code and writes one message for each mistake."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    with Interrupts() as interrupts, _Ending(interrupts) as ending:
        ending.code = _dispatch(given)
    _flush_output()
    return ending.code


def _flush_output() -> None:
    """Give away what is left to say; where nobody reads it (`| head`), it goes nowhere, and the exit code stands."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class _Ending:
    """The end of the process: whatever stopped the command becomes an exit code and one last line.

    A mistake is told by its message alone; any fault shows where it came from before that.
    """

    def __init__(self, interrupts: Interrupts) -> None:
        self.code = OK
        self._interrupts = interrupts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exception: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> bool:
        match error:
            case KeyboardInterrupt():
                self._interrupted()
            case Exception() if self._interrupts.seen:
                self._interrupted()
            case UserError():
                self._stop(USER_ERROR, str(error))
            case Exception():
                traceback.print_exception(error)
                self._stop(FATAL, f"the job stopped: {_last_line(error)}")
            case _:
                return False
        return True

    def _interrupted(self) -> None:
        self.code = INTERRUPTED
        sys.stderr.write(INTERRUPTED_MESSAGE)

    def _stop(self, code: int, message: str) -> None:
        self.code = code
        sys.stderr.write(f"batchgen-beam: {message}\n")


def _dispatch(given: Sequence[str]) -> int:
    if not given or given[0] in _HELP:
        print(_usage())
        return OK if given else USER_ERROR
    command, flags = given[0], given[1:]
    if command not in COMMANDS:
        raise OptionError(f"unknown command {command!r}; use one of {', '.join(COMMANDS)}")
    if command == "plan":
        return _plan(flags)
    if command == "inspect":
        return _inspect(flags)
    if command == "bench":
        return _bench(flags)
    return _run(command, flags)


def _plan(flags: Sequence[str]) -> int:
    with _quiet_imports():
        from batchgen_beam.pipelines.plan import plan_model
    plan_model(flags, sys.stdout)
    return OK


def _inspect(flags: Sequence[str]) -> int:
    with _quiet_imports():
        from batchgen_beam.pipelines.inspect_model import inspect_model
    inspect_model(flags, sys.stdout)
    return OK


def _bench(flags: Sequence[str]) -> int:
    with _quiet_imports():
        from batchgen_beam.pipelines.bench import bench_model
    bench_model(flags, sys.stdout)
    return OK


def _run(command: str, flags: Sequence[str]) -> int:
    with _quiet_imports():
        from batchgen_beam.pipelines.demo import demo_options
        from batchgen_beam.pipelines.launch import Streams, run_job
        from batchgen_beam.pipelines.options import help_text, parse_options
    if any(flag in _HELP for flag in flags):
        print(help_text(command, COMMANDS[command]))
        return OK
    options = demo_options(flags) if command == "demo" else parse_options(flags)
    failed = run_job(options, Streams(sys.stdout, sys.stderr))
    return ROWS_FAILED if failed and not options.allow_failures else OK


@contextmanager
def _quiet_imports() -> Iterator[None]:
    """Imports of seconds, made only by the commands that need them; Beam warns in them about absent cloud clients."""
    logging.basicConfig(level=logging.ERROR, format="%(levelname)s %(name)s: %(message)s")
    yield
    logging.getLogger().setLevel(logging.WARNING)


def _usage() -> str:
    lines = [f"  {name:<10}{what}" for name, what in COMMANDS.items()]
    return "\n".join(["usage: batchgen-beam COMMAND [FLAGS]", "", *lines, "", "more: batchgen-beam COMMAND --help"])


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
