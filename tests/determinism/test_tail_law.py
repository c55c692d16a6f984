"""A last row that goes on in several processes has the bits of one that stays, whatever becomes of the processes."""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from batchgen_beam.engine.driver import Driver
from batchgen_beam.engine.tail_rule import Tail, TailChoice, TailCost, TailRule, plan_tail
from batchgen_beam.kernels.process_group import MeetingPlace
from batchgen_beam.records import Answer, Prompt
from batchgen_beam.settings import EngineSettings
from batchgen_beam.transforms.engine_loader import LoadedEngine
from batchgen_beam.transforms.tail_follower import FollowerTask
from tests.determinism.law import Bits
from tests.engine.rigs import prompt, said
from tests.kernels.sets import NEEDS_NATIVE
from tests.support.jobs import ROOT
from tests.support.tails import SETTINGS, free_group, load, write_model

WAIT = 60
PROMPTS = [prompt(f"row-{i}", (40, 3, 70)[i % 3], max_tokens=(5, 36, 9)[i % 3], temperature=float(i % 2), logprobs=2,
                  seed=i) for i in range(3)]
"""The second one is the last by far."""
PLAIN = prompt("plain", 9, max_tokens=20, temperature=0.0)
"""A row without draws and alternatives: the native kernels have another way to its log-probabilities."""

NATIVE = replace(SETTINGS, dtype="bfloat16", kernels="native", threads=2)
INT8 = replace(SETTINGS, kernels="torch", kv_dtype="int8")
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints by family, made once each."""
    return cache(lambda family: write_model(family, tmp_path_factory.mktemp("tail") / family))


@contextmanager
def loaded(folder: Path, settings: EngineSettings, rule: TailRule = free_group) -> Iterator[LoadedEngine]:
    """A worker's engine; this process has its threads back afterwards, and no process is left."""
    threads = torch.get_num_threads()
    engine = load(folder, settings, rule=rule)
    try:
        yield engine
    finally:
        engine.close()
        torch.set_num_threads(threads)
    assert engine.tail is None or all(process.poll() is not None for process in engine.tail.processes)


def answers_of(driver: Driver, lane: str, prompts: list[Prompt]) -> Bits:
    """What rows of a lane are answered, once it is known that no more come."""
    driver.open_lane(lane, prompts)
    driver.fed(lane)
    answers: list[Answer] = []
    while driver.pending(lane):
        answers += driver.take(lane, timeout=WAIT)
    return said({answer.key.uuid: answer for answer in answers})


@cache
def in_one_process(folder: Path, settings: EngineSettings) -> Bits:
    """The reference, without a tail's processes."""
    with loaded(folder, settings) as engine:
        return answers_of(engine.driver, "lane", [*PROMPTS, PLAIN])


def hold(engine: LoadedEngine, expected: Bits) -> None:
    """The rows' bits are these, and all processes of the tail did generate most tokens of both last rows."""
    assert engine.tail is not None
    assert all(process.poll() is None for process in engine.tail.processes)
    plain = answers_of(engine.driver, "before", [PLAIN])
    assert plain | answers_of(engine.driver, "lane", PROMPTS) == expected
    stats = engine.driver.stats()
    assert (stats.rows_done, stats.split_rows) == (4, 2)
    assert stats.split_tokens > 40
    assert stats.generated_tokens == sum(len(bits[0]) for bits in expected.values())  # type: ignore[arg-type]


@NEEDS_NATIVE
def test_a_last_row_in_two_processes_has_the_bits_of_one(folders: Callable[[str], Path]) -> None:
    """A Llama on native kernels: the last of a worker's rows goes on in two processes, of half the threads each, with
    the same ids and log-probability bits; the processes end when they are told to."""
    expected = in_one_process(folders("llama"), NATIVE)
    with loaded(folders("llama"), replace(NATIVE, tail_processes=2)) as engine:
        hold(engine, expected)
    assert engine.tail is not None
    assert [process.returncode for process in engine.tail.processes] == [0]


def test_a_killed_process_loses_no_row(folders: Callable[[str], Path]) -> None:
    """A Mixtral with int8 pages: the last row has the same bits in two processes; and where one of them is killed as
    the last row of the next lane comes to them, that row and those of later lanes are computed by the worker alone,
    with the same bits."""
    pids: list[int] = []

    def killing(tail: Tail, cost: TailCost) -> TailChoice:
        choice = free_group(tail, cost)
        if choice is TailChoice.SPLIT and pids:
            os.kill(pids.pop(), signal.SIGKILL)
        return choice

    expected = in_one_process(folders("mixtral"), INT8)
    with loaded(folders("mixtral"), replace(INT8, tail_processes=2), killing) as engine:
        hold(engine, expected)
        assert engine.tail is not None
        pids += [process.pid for process in engine.tail.processes]
        before = engine.driver.stats()
        for lane in ("the next", "a later one"):
            assert answers_of(engine.driver, lane, [*PROMPTS, PLAIN]) == expected
        stats = engine.driver.stats()
        assert (stats.split_rows, stats.split_tokens) == (3, before.split_tokens)
        assert [process.returncode for process in engine.tail.processes] == [-signal.SIGKILL]


def test_processes_that_never_pay_end_at_once(folders: Callable[[str], Path]) -> None:
    """Where a step of all takes longer than a step of one, as measured, they end before the first row."""
    def slow_group(tail: Tail, cost: TailCost) -> TailChoice:
        assert min(cost.here, cost.split, cost.prefill) > 0
        return plan_tail(tail, replace(cost, split=2 * cost.here))

    settings = replace(SETTINGS, kernels="torch", tail_processes=2)
    with loaded(folders("llama"), settings, slow_group) as engine:
        assert engine.tail is not None
        assert [process.returncode for process in engine.tail.processes] == [0]
        assert engine.tail.verdict.endswith("no row will, they end")
        assert len(answers_of(engine.driver, "lane", PROMPTS[:1])) == 1


def test_the_processes_end_with_their_leader(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """A leader that is killed leaves no process behind."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.tail_leader", str(folders("llama"))]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "TMPDIR": str(tmp_path)}) as leader:
        assert leader.stdout is not None
        follower = os.pidfd_open(int(leader.stdout.readline()))
        leader.kill()
    try:
        assert select.select([follower], [], [], WAIT)[0] == [follower]
    finally:
        os.close(follower)


def test_a_process_ends_with_a_leader_that_it_has_not_met(folders: Callable[[str], Path], tmp_path: Path) -> None:
    """The end of its input ends it while it waits for the others, as the leader's end would."""
    task = FollowerTask(model=folders("llama"), settings=SETTINGS, path=None, rank=1,
                        place=MeetingPlace(folder=tmp_path, size=2, join=WAIT, answer=WAIT))
    command = [sys.executable, "-c", "from batchgen_beam.transforms.tail_follower import main; main()"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE) as follower:
        follower.communicate(pickle.dumps(task), timeout=WAIT / 2)
    assert follower.returncode == 1
