"""Laws of commands that are interrupted, that lose a worker, and that run beside one another on one output."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from batchgen_beam.pipelines.main import INTERRUPTED, OK
from batchgen_beam.records import ContinuationRecord, Failure, Outcome
from tests.faults.conftest import Reference
from tests.faults.events import FolderWatch, is_part
from tests.faults.job import Job, run_figures
from tests.faults.kills import journal_of, run_names

pytestmark = pytest.mark.timeout(600)


def first_part(job: Job, output: Path) -> subprocess.Popen[bytes]:
    """The command, running, with its first part of the journal written."""
    output.mkdir()
    with FolderWatch(output) as watch:
        process = job.start(output)
        while process.poll() is None:
            if any(event.appeared() and is_part(event.path) for event in watch.events(0.2)):
                return process
    raise AssertionError(f"the command ended with {process.returncode} before it wrote a part")


def unanswered(output: Path) -> set[str]:
    """Ids of rows that have a continuation in the journal and no answer."""
    journal = journal_of(output)
    assert journal is not None
    entries = [entry for part in journal.parts() for entry in journal.entries(part).entries]
    answered = {entry.key.uuid for entry in entries if isinstance(entry, Outcome | Failure)}
    return {entry.key.uuid for entry in entries if isinstance(entry, ContinuationRecord)} - answered


def end(process: subprocess.Popen[bytes]) -> None:
    """Whatever is left of it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def workers(process: subprocess.Popen[bytes]) -> list[int]:
    """Processes of Python that Beam started for the command, each through a shell."""
    found = [(path, path.read_bytes().split(b"\0")) for path in Path("/proc").glob("[0-9]*/cmdline")]
    pids = [int(path.parent.name) for path, words in found
            if b"python" in words[0] and any(b"sdk_worker_main" in word for word in words)]
    return [pid for pid in pids if os.getpgid(pid) == process.pid]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_an_interrupted_command_keeps_the_rows_under_way(
        reference: Reference, tmp_path: Path, number: signal.Signals) -> None:
    """Within 20 s it ends with 130; every running row has a continuation, from which the same command goes on."""
    output = tmp_path / "out"
    process = first_part(reference.job, output)
    try:
        process.send_signal(number)
        assert process.wait(20) == INTERRUPTED
    finally:
        end(process)
    under_way = unanswered(output)
    assert under_way
    assert not (output / "_SUCCESS").exists()
    assert not list((output / "_journal").rglob("in-flight-*")), "a clean end is no row's fault"
    assert reference.job.run(output).code == OK
    assert run_figures(output, run_names(output)[-1:])[run_names(output)[-1]]["resumed_rows"] == len(under_way)
    assert reference.faults(output) == []


def test_two_commands_on_one_output_work_together(reference: Reference, tmp_path: Path) -> None:
    """There is no lock: both end well, and what is published is what one would have published."""
    output = tmp_path / "out"
    pair = [reference.job.start(output) for _ in range(2)]
    try:
        assert [process.wait(300) for process in pair] == [OK, OK]
    finally:
        for process in pair:
            end(process)
    assert reference.faults(output) == []


def test_a_command_that_loses_a_worker_process_goes_on_when_it_is_run_again(
        reference: Reference, tmp_path: Path) -> None:
    """SIGKILL of an SDK worker: the command does not hang, and the same command ends with the same bits."""
    output = tmp_path / "out"
    job = replace(reference.job, flags=(
        *reference.job.flags, "--direct_running_mode=multi_processing", "--direct_num_workers=2"))
    process = first_part(job, output)
    try:
        os.kill(workers(process)[0], signal.SIGKILL)
        assert process.wait(240) != OK
    finally:
        end(process)
    assert job.run(output).code == OK
    assert reference.faults(output) == []
