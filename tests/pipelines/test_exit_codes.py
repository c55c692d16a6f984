"""Laws of the exit codes, seen from outside: 0 done, 3 rows failed, 2 refused, 130 interrupted."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from batchgen_beam.text.fake_folder import write_fake_folder
from tests.support.jobs import command, questions, report, run_flags, write_rows

pytestmark = pytest.mark.timeout(240)


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and inputs: good rows, and rows of which some are bad."""
    folder = tmp_path_factory.mktemp("cli")
    write_fake_folder(folder / "model")
    write_fake_folder(folder / "endless", eos_every=0)
    write_rows(folder / "good" / "a.parquet", questions(30))
    write_rows(folder / "mixed" / "a.parquet", [*questions(10), {"uuid": "bad", "prompt": ""}])
    write_rows(folder / "long" / "a.parquet", [{**row, "max_tokens": 700} for row in questions(400)])
    return folder


@pytest.fixture(scope="module")
def ended(place: Path) -> dict[str, Ended]:
    """Runs that go on at the same time, and how they ended."""
    def flags(source: str, output: str, *more: str) -> list[str]:
        return run_flags(f"{source}/*.parquet", Path(output), place / "model", *more)

    started = {name: command(arguments, place) for name, arguments in {
        "good": flags("good", "out-good", "--runner=DirectRunner"),
        "mixed": flags("mixed", "out-mixed"),
        "no input": flags("nothing", "out-nothing"),
        "unread": flags("mixed", "out-unread"),
    }.items()}
    assert started["unread"].stdout is not None
    started["unread"].stdout.close()
    started["unread"].stdout = None
    results = {}
    try:
        for name, process in started.items():
            out, err = process.communicate(timeout=200)
            results[name] = Ended(process.returncode, out, err)
    finally:
        for process in started.values():
            process.kill()
    return results


def test_a_run_without_failures_ends_with_0(ended: dict[str, Ended], place: Path) -> None:
    """The summary balances, names the places of the results, and _SUCCESS stands."""
    good = ended["good"]
    assert good.code == 0, good.err
    assert "30 rows read = 30 answered + 0 failed" in good.out
    assert "out-good/results" in good.out
    assert (place / "out-good" / "_SUCCESS").exists()


def test_the_direct_runner_is_pinned_in_one_line(ended: dict[str, Ended]) -> None:
    """Whoever names Beam's DirectRunner is told what runs instead."""
    assert ended["good"].err.count("DirectRunner means FnApiRunner") == 1


def test_failed_rows_end_with_3(ended: dict[str, Ended], place: Path) -> None:
    """The run is finished all the same, its counts balance."""
    assert ended["mixed"].code == 3, ended["mixed"].err
    assert "11 rows read = 10 answered + 1 failed" in ended["mixed"].out
    assert report(place / "out-mixed")["counts"]["failures"] == {"EMPTY_PROMPT": 1}


def test_a_mistake_ends_with_2_in_one_message(ended: dict[str, Ended], place: Path) -> None:
    """Nothing was begun: no output folder, one message that names the pattern."""
    refused = ended["no input"]
    assert refused.code == 2
    assert "nothing/*.parquet' matches no file" in refused.err
    assert "Traceback" not in refused.err
    assert not (place / "out-nothing").exists()


def read_until(process: subprocess.Popen[str], text: str) -> None:
    """Read the process's messages up to a line that holds `text`; it must not end before."""
    assert process.stderr is not None
    line = ""
    while text not in line:
        line = process.stderr.readline()
        assert line, "the run ended before it was interrupted"


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM])
def test_an_interrupted_run_ends_with_130(place: Path, number: signal.Signals) -> None:
    """Within 20 s of a Ctrl-C or a termination signal, and saying that the same command goes on."""
    output = Path(f"out-{number.name}")
    process = command(run_flags("long/*.parquet", output, place / "endless", "--progress-interval=0.5"), place)
    try:
        read_until(process, "running 8/8")
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert not (place / output / "_SUCCESS").exists()


def demand_130(process: subprocess.Popen[str], wait: Callable[[], object]) -> None:
    """Once `wait` is over, a signal ends the command soon, with one word about it."""
    try:
        wait()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert err.count("interrupted") == 1


def test_a_signal_before_the_job_begins_ends_with_130(place: Path) -> None:
    """While the libraries are still being imported, too."""
    process = command(run_flags("good/*.parquet", Path("out-early"), place / "model"), place)
    demand_130(process, lambda: time.sleep(1.5))
    assert not (place / "out-early").exists()


@pytest.mark.long
def test_a_signal_while_worker_processes_start_ends_with_130(place: Path) -> None:
    """Beam waits for them without limit; the command does not."""
    process = command(run_flags("long/*.parquet", Path("out-workers"), place / "endless", "--progress-interval=0.5",
                                "--direct_running_mode=multi_processing", "--direct_num_workers=2"), place)
    demand_130(process, lambda: read_until(process, "[2 s]"))


def test_nobody_needs_to_read_the_summary(ended: dict[str, Ended], place: Path) -> None:
    """With a closed standard output (`| head`) the job ends as it does otherwise."""
    assert ended["unread"].code == 3, ended["unread"].err
    assert "BrokenPipe" not in ended["unread"].err
    assert (place / "out-unread" / "_SUCCESS").exists()
