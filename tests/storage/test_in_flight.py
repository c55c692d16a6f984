"""Attempts: a process that died leaves one for each of its rows, one that lives or ended well leaves none."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen_beam.storage.in_flight import (
    REFRESH_SECONDS,
    SILENT_SECONDS,
    Attempt,
    InFlightFile,
    combined,
    dead_attempts,
    remove_in_flight,
)
from batchgen_beam.storage.journal import Journal
from tests.package_sources import ROOT

NOW = 1_700_000_000.0

CHILD = """
import sys, time
from batchgen_beam.storage.in_flight import Attempt, InFlightFile, dead_attempts
from batchgen_beam.storage.journal import Journal
journal = Journal(sys.argv[1])
known = dead_attempts(journal, now=time.time())
rows = {text: Attempt(attempts=known[text].attempts if text in known else 0, alone=len(sys.argv) == 4)
        for text in sys.argv[3:]}
file = InFlightFile(journal, "r", sys.argv[2])
file.write(rows)
sys.stdout.write("written\\n")
sys.stdout.flush()
sys.stdin.readline()
file.remove()
"""


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """An empty journal."""
    return Journal.of(str(tmp_path), "c")


def child(journal: Journal, name: str, *rows: str) -> subprocess.Popen[str]:
    """A process with these rows in its engine, alone if there is one."""
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", CHILD, journal.folder, name, *rows], cwd=ROOT,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "written\n"
    return process


def test_a_killed_process_leaves_one_attempt_of_each_row(journal: Journal) -> None:
    """None while it lives; one once it was killed, before anybody has waited for it too; a second death makes two."""
    first = child(journal, "one", "a", "b")
    assert dead_attempts(journal, now=NOW) == {}
    os.kill(first.pid, signal.SIGKILL)
    os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{first.pid}").exists(), "it is a zombie"
    assert dead_attempts(journal, now=NOW) == {"a": Attempt(attempts=1), "b": Attempt(attempts=1)}
    first.communicate()
    second = child(journal, "two", "b")
    assert dead_attempts(journal, now=NOW)["b"] == Attempt(attempts=1)
    second.kill()
    second.communicate()
    assert dead_attempts(journal, now=NOW) == {"a": Attempt(attempts=1), "b": Attempt(attempts=2, alone=True)}


def test_a_process_that_ended_well_leaves_none(journal: Journal) -> None:
    """It takes its file with it."""
    process = child(journal, "one", "a")
    process.communicate("end\n")
    assert process.returncode == 0
    assert dead_attempts(journal, now=NOW + 1e9) == {}


def facts_of(journal: Journal, name: str) -> tuple[Path, dict[str, object]]:
    """A file and what it says."""
    path = Path(journal.run_folder("r")) / f"in-flight-{name}.json"
    return path, json.loads(path.read_text())


def test_a_process_id_that_was_given_again_is_another_process(journal: Journal) -> None:
    """Same host and pid, begun at another time: the one that wrote is dead."""
    InFlightFile(journal, "r", "p").write({"a": Attempt()})
    assert dead_attempts(journal, now=NOW + 1e9) == {}, "this process lives, however long it says nothing"
    path, facts = facts_of(journal, "p")
    facts["process"]["started"] = "1"  # type: ignore[index]
    path.write_text(json.dumps(facts))
    assert dead_attempts(journal, now=NOW) == {"a": Attempt(attempts=1)}


def test_a_process_of_another_host_is_dead_when_it_is_silent(journal: Journal) -> None:
    """Five minutes after it last wrote; writing the same again is a sign of life, and comes once a minute."""
    now = NOW
    file = InFlightFile(journal, "r", "p", clock=lambda: now)
    file.refresh()
    assert dead_attempts(journal, now=NOW) == {}, "nothing was written yet"

    def moved_elsewhere() -> None:
        path, facts = facts_of(journal, "p")
        facts["process"]["host"] = "elsewhere"  # type: ignore[index]
        path.write_text(json.dumps(facts))

    file.write({"a": Attempt(attempts=2, length=5)})
    moved_elsewhere()
    assert dead_attempts(journal, now=NOW + SILENT_SECONDS) == {}
    dead = {"a": Attempt(attempts=3, length=5)}
    assert dead_attempts(journal, now=NOW + SILENT_SECONDS + 1) == dead
    now = NOW + REFRESH_SECONDS - 1
    file.refresh()
    assert dead_attempts(journal, now=NOW + SILENT_SECONDS + 1) == dead, "not yet a minute: nothing was written"
    now = NOW + REFRESH_SECONDS
    file.refresh()
    moved_elsewhere()
    assert dead_attempts(journal, now=now + SILENT_SECONDS) == {}


def test_the_last_writing_counts(journal: Journal) -> None:
    """A row that has left the engine is no attempt any more."""
    file = InFlightFile(journal, "r", "p")
    file.write({"a": Attempt(), "b": Attempt()})
    file.write({"b": Attempt()})
    assert facts_of(journal, "p")[1]["rows"] == {"b": [0, False, 0]}
    file.remove()
    file.remove()
    assert dead_attempts(journal, now=NOW) == {}


def test_strange_files_count_as_nothing(journal: Journal) -> None:
    """Torn, empty, foreign and of a later release."""
    InFlightFile(journal, "r", "p").write({"a": Attempt()})
    path, facts = facts_of(journal, "p")
    facts["process"]["started"] = "1"  # type: ignore[index]
    whole = json.dumps(facts)
    for text in ("", whole[:20], whole[:-1], "[]", "7", "{}", whole.replace('"version": 1', '"version": 2'),
                 whole.replace('"pid"', '"pod"'), whole.replace("[0, false, 0]", "[0]")):
        path.write_text(text)
        assert dead_attempts(journal, now=NOW + 1e9) == {}
    path.write_text(whole)
    assert dead_attempts(journal, now=NOW) == {"a": Attempt(attempts=1)}


def test_progress_forgives() -> None:
    """Deaths before a row grew don't count; deaths that knew of each other, or not, count once each."""
    def of(*rows: Attempt) -> Attempt:
        return combined({"a": row} for row in rows)["a"]

    assert of(Attempt(attempts=2, length=4), Attempt(attempts=0, length=5)) == Attempt(attempts=1, length=5)
    assert of(Attempt(attempts=0), Attempt(attempts=1), Attempt(attempts=2)) == Attempt(attempts=3)
    assert of(Attempt(), Attempt(), Attempt()) == Attempt(attempts=3)
    assert of(Attempt(attempts=3, alone=True), Attempt(attempts=2)) == Attempt(attempts=4, alone=True)
    assert of(Attempt(attempts=3, alone=True), Attempt(length=1)) == Attempt(attempts=1, length=1)


_FILES = st.lists(st.dictionaries(st.sampled_from("abc"), st.builds(
    Attempt, attempts=st.integers(0, 4), alone=st.booleans(), length=st.integers(0, 3))), max_size=5)


@given(_FILES, st.randoms(use_true_random=False))
def test_the_order_of_the_files_decides_nothing(files: list[Mapping[str, Attempt]], chance: random.Random) -> None:
    """The combination is of a set."""
    wanted = combined(files)
    chance.shuffle(files)
    assert combined(files) == wanted


def test_files_of_ended_runs_are_removed_by_name(journal: Journal) -> None:
    """Only those of the runs that are named."""
    for run in ("r", "s", "t"):
        InFlightFile(journal, run, "p").write({run: Attempt()})
    assert remove_in_flight(journal, ["r", "t", "unknown"]) == 2
    assert [path.parent.name for path in Path(journal.folder).glob("*/*")] == ["run=s"]
