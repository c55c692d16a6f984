"""Laws of the engine's life in a process: one for all DoFns, loaded once, stopped when dropped, sized first."""

from __future__ import annotations

import gc
import pickle
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from batchgen_beam.errors import EngineError, OptionError
from batchgen_beam.text.fake_folder import write_fake_folder
from batchgen_beam.transforms.host import ProcessHost
from batchgen_beam.transforms.progress_files import read_samples
from batchgen_beam.transforms.resources import available_cores
from tests.support.hosting import host_handle, input_row, make_prompt

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model."""
    return write_fake_folder(tmp_path / "fake")


def test_copies_of_a_handle_share_one_engine(folder: Path) -> None:
    """Every pickled copy of a handle, asked from many threads at once, gives the same host and one load."""
    data = pickle.dumps(host_handle(folder))
    hosts: list[ProcessHost] = []

    def acquire() -> None:
        host = pickle.loads(data).acquire()
        host.engine()
        hosts.append(host)

    threads = [threading.Thread(target=acquire) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, hosts))) == 1
    assert hosts[0].loads == 1


def test_a_host_that_only_prepares_loads_no_engine(folder: Path) -> None:
    """The tokenizer side works without weights."""
    host = host_handle(folder).acquire()
    assert len(host.preparer().prepare(input_row(0, prompt="a question")).token_ids) > 1
    assert host.loads == 0
    assert host.sample().engines == 0


def test_a_dropped_host_stops_its_threads(folder: Path, tmp_path: Path) -> None:
    """The driver and the progress thread end with the host; nobody has to close anything."""
    before = set(threading.enumerate())
    host = ProcessHost(host_handle(folder, progress=tmp_path / "progress").settings)
    driver = host.engine().driver
    mine = set(threading.enumerate()) - before
    assert {thread.name for thread in mine} == {"batchgen-engine", "batchgen-progress"}
    del host
    gc.collect()
    assert not any(thread.is_alive() for thread in mine)
    with pytest.raises(EngineError, match="closed"):
        driver.submit("lane", [make_prompt(0)])


def test_a_pool_too_small_for_one_page_is_refused(folder: Path) -> None:
    """The message says what is needed and what there is."""
    with pytest.raises(OptionError, match=r"one KV page of each cache group need \d+ bytes, --kv-memory is 99"):
        host_handle(folder, kv_memory=99).acquire().engine()


def test_progress_is_written_while_the_engine_runs(folder: Path, tmp_path: Path) -> None:
    """The process's file is overwritten with what has been done so far, and once more on request."""
    progress = tmp_path / "out" / "_progress" / "run"
    host = host_handle(folder, progress=progress).acquire()
    driver = host.engine().driver
    driver.open_lane("lane", [make_prompt(index) for index in range(20)])
    deadline = time.monotonic() + 20
    while driver.pending("lane") and time.monotonic() < deadline:
        for answer in driver.take("lane", timeout=0.1):
            host.count(answer)
    host.report()
    readings = read_samples(str(progress))
    assert readings.unreadable == 0
    [sample] = readings.samples
    assert (sample.answered, sample.failed, sample.engines, sample.engine.capacity) == (20, {}, 1, 8)
    assert sample.engine.generated_tokens > 20
    assert 0 < sample.last_row_seconds <= sample.elapsed_seconds
    assert 0 < sample.pages_peak <= sample.engine.pages_total
    assert 0 < sample.fill <= 1
    assert [path.suffix for path in progress.iterdir()] == [".json"]


def test_numeric_print_tells_the_arithmetic(folder: Path) -> None:
    """Another number format or thread count is another numeric print; the same settings give the same one."""
    def numeric(**engine: object) -> str:
        return host_handle(folder, **engine).acquire().engine().loaded.numeric.digest

    assert numeric() == numeric()
    assert len({numeric(), numeric(dtype="bfloat16"), numeric(threads=2)}) == 3


def test_two_runs_in_one_process_have_their_own_engines(folder: Path) -> None:
    """A handle made anew is another run: nothing of the former is found in it."""
    one, other = host_handle(folder), host_handle(folder)
    first, second = one.acquire(), other.acquire()
    assert first is not second
    assert first.engine().driver is not second.engine().driver


def test_processes_of_a_machine_divide_its_cores_and_memory(folder: Path) -> None:
    """What the user leaves open is shared; what the user says holds for each engine."""
    shared = replace(host_handle(folder, threads=0, kv_memory=0).settings, processes=10_000)
    alone = replace(shared, processes=1)
    assert shared.engine_settings().threads == 1
    assert alone.engine_settings().threads == available_cores()
    assert 0 < shared.engine_settings().kv_memory < alone.engine_settings().kv_memory
    said = replace(host_handle(folder, threads=3, kv_memory=1 << 20).settings, processes=2).engine_settings()
    assert (said.threads, said.kv_memory) == (3, 1 << 20)
