"""PARTITION over real processes: the bits of one process, and an end of one is the end of all, by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen_beam.engine.engine import Engine
from batchgen_beam.engine.partition import follow, leading
from batchgen_beam.engine.stats import EngineFacts
from batchgen_beam.errors import EngineError
from batchgen_beam.kernels.process_group import MeetingPlace, ProcessGroup
from batchgen_beam.models.interface import KernelSet
from batchgen_beam.records import ContinuationRecord, Prompt
from batchgen_beam.settings import EngineSettings
from batchgen_beam.weights.loader import load_model
from tests.engine.partition_processes import WAIT, Case, DirtyKernels, followers
from tests.engine.rigs import Churn, finish, kv_bytes, prompt, run, said
from tests.kernels.partitions import in_partition as in_partition_of_threads
from tests.kernels.sets import HIGHEST, NEEDS_NATIVE
from tests.models import tiny_llama
from tests.models.tiny import TINIES, make_reference

LARGER = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 160}
"""So that every product can be dealt."""

FACTS = EngineFacts(eos_ids=frozenset({7}), text_vocabulary=300, content_print="tiny", numeric_print="here")
SETTINGS = EngineSettings(dtype="float32", max_rows=6, step_tokens=128, prefill_chunk=48, kv_memory=1 << 24)
PROMPTS = [prompt(f"row-{i}", (61, 3, 59, 70)[i % 4], max_tokens=8 + i, temperature=float(i % 2), logprobs=i % 3)
           for i in range(5)]
"""Greedy and drawn, with and without alternatives: kernel sets have several ways to a log-probability."""

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Llama and a Mixtral."""
    mixtral = replace(TINIES["mixtral"], keys={**TINIES["mixtral"].keys, **LARGER})
    places = {name: tmp_path_factory.mktemp(name) / "model" for name in ("llama", "mixtral")}
    return {"llama": tiny_llama.make_reference(tiny_llama.Tiny(keys=LARGER), places["llama"]).folder,
            "mixtral": make_reference(mixtral, places["mixtral"]).folder}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """In this process as in the others: torch's bits may depend on the number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def alone(case: Case) -> Engine:
    """The engine of one process."""
    kernels = case.kernels()
    return Engine(load_model(case.folder, kernels), kernels, case.settings, FACTS)


@contextmanager
def leader(case: Case, kernels: KernelSet, group: ProcessGroup, **more: Any) -> Iterator[Engine]:
    """The engine that leads a group."""
    model = load_model(case.folder, kernels)
    with leading(model, kernels, case.settings, group) as executor:
        yield Engine(model, kernels, case.settings, FACTS, make_executor=executor, **more)


def in_partition(case: Case, folder: Path, size: int, work: Callable[[Engine], object], **more: Any) -> None:
    """`work` with the engine that leads `size` processes, all of which end well after it."""
    place = MeetingPlace(folder=folder, size=size, join=WAIT, answer=WAIT)
    with followers(case, place) as others:
        with ProcessGroup(place, 0) as group, leader(case, DirtyKernels(case.kernels(), group), group,
                                                     **more) as engine:
            work(engine)
        for process in others:
            process.join(WAIT)
        assert [process.exitcode for process in others] == [0] * (size - 1)


def case_of(name: str, folders: dict[str, Path]) -> Case:
    """`family dtype set`."""
    family, dtype, kernels = name.split()
    path = HIGHEST[getattr(torch, dtype)] if kernels == "native" else None
    return Case(folder=folders[family], settings=replace(SETTINGS, dtype=dtype), path=path)


CASES = ["llama float32 torch", "mixtral float32 torch",
         pytest.param("llama bfloat16 native", marks=NEEDS_NATIVE)]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_have_the_bits_of_one(name: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Rows over two processes, by sub-batches and with rows that lose their pages to others, have the ids and
    log-probability bits of rows alone in one process."""
    case = case_of(name, folders)
    expected = {key: bits for one in PROMPTS for key, bits in said(run(alone(case), [one])).items()}
    pages, churn = kv_bytes(load_model(case.folder, case.kernels()), 1), Churn(every=1, times=1)
    small = replace(case.settings, kv_memory=14 * pages, kv_host_memory=8 * pages, attention_batch=2, expert_batch=16)

    def work(engine: Engine) -> None:
        assert said(run(engine, PROMPTS)) == expected
        assert min(len(churn.holds), len(churn.evictions)) > 1

    in_partition(replace(case, settings=small), tmp_path / "p", 2, work, schedule=churn)


def test_every_process_clears_the_pages_that_rows_get(folders: dict[str, Path], tmp_path: Path) -> None:
    """A page that a row got holds numbers only, in the leader's part of the cache and in its follower's."""
    case = case_of("mixtral float32 torch", folders)

    def work(group: ProcessGroup) -> list[Tensor]:
        kernels = DirtyKernels(case.kernels(), group)
        if group.rank:
            follow(load_model(case.folder, kernels), kernels, case.settings, group)
        else:
            with leader(case, kernels, group) as engine:
                run(engine, PROMPTS[:2])
        return kernels.dirty_pages()

    for one, other in zip(*in_partition_of_threads(tmp_path / "p", 2, work), strict=True):
        assert torch.equal(one, other)
        assert len(one) == 1 or not bool(one.all())


def test_a_straggler_goes_on_in_three_processes(folders: dict[str, Path], tmp_path: Path) -> None:
    """The last row of an engine, suspended in the middle and resumed over three processes, ends with the same bits."""
    case = case_of("mixtral float32 torch", folders)
    one: Prompt = PROMPTS[2]
    expected, begun = said(run(alone(case), [one])), alone(case)
    begun.submit(one)
    while begun.stats().generated_tokens < 5:
        begun.step()
    (record,) = begun.suspend_all()
    assert 0 < len(record.generated_ids) < len(expected["row-2"][0])  # type: ignore[arg-type]

    def work(engine: Engine) -> None:
        engine.resume(ContinuationRecord.from_bytes(record.to_bytes()))
        assert said(finish(engine)) == expected

    in_partition(case, tmp_path / "p", 3, work)


def test_an_error_of_the_leader_ends_the_others_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    """A follower that waits for the next command learns what ended its leader."""
    place = MeetingPlace(folder=tmp_path / "p", size=2, join=WAIT, answer=WAIT)
    case = case_of("llama float32 torch", folders)

    def lead() -> None:
        with ProcessGroup(place, 0) as group, leader(case, DirtyKernels(case.kernels(), group), group) as engine:
            engine.submit(PROMPTS[0])
            engine.step()
            raise MemoryError("no room for the next step")

    with followers(case, place) as (other,):
        with pytest.raises(MemoryError):
            lead()
        other.join(WAIT)
        assert other.exitcode == 3
    assert (place.folder / "error-1").read_text() == (
        "process 0 of the partition's 2 ended: MemoryError: no room for the next step")


@pytest.mark.parametrize(("fault", "message"), [
    ("broken", r"process 1 of the partition's 2 ended: CheckpointError: .*config\.json"),
    (signal.SIGKILL, "a process of the partition's 2 ended without a word"),
    (signal.SIGSTOP, r"a process of the partition's 2 ended .*gave no answer within 4 s"),
])
def test_a_lost_follower_ends_the_leader_by_name(fault: str | signal.Signals, message: str, folders: dict[str, Path],
                                                 tmp_path: Path) -> None:
    """A follower that can't load, is killed, or stands still: the leader's next step says so and does not hang."""
    case = case_of("llama float32 torch", folders)
    place = MeetingPlace(folder=tmp_path / "p", size=2, join=WAIT, answer=4 if fault is signal.SIGSTOP else WAIT)
    theirs = replace(case, folder=tmp_path / "p") if fault == "broken" else case

    def lead(pid: int) -> None:
        with ProcessGroup(place, 0) as group, leader(case, DirtyKernels(case.kernels(), group), group) as engine:
            engine.submit(PROMPTS[0])
            engine.step()
            if isinstance(fault, signal.Signals):
                os.kill(pid, fault)
            finish(engine)

    with followers(theirs, place) as (other,):
        assert other.pid is not None
        with pytest.raises(EngineError, match=message):
            lead(other.pid)
        if fault is signal.SIGSTOP:
            other.kill()
