"""Laws of what a process may take of its machine: the tightest limit that binds it, and no more than there is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchgen_beam.transforms.resources import available_cores, available_memory, default_kv_memory

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no process to cores")

PERIOD = 100_000
NOBODY = "0::/\n"


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may run on eight cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


def write(place: Path, text: str) -> None:
    """A file, with the folders that it lies in."""
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def own(folder: Path, text: str) -> Path:
    """What the process is told of its own control groups."""
    write(folder / "own", text)
    return folder / "own"


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize(("limit", "cores"), [
    (f"{2 * PERIOD} {PERIOD}", 2), (f"{2 * PERIOD + 1} {PERIOD}", 3), (f"1000 {PERIOD}", 1), (f"max {PERIOD}", 8),
    (f"{20 * PERIOD} {PERIOD}", 8), ("", 8), ("broken", 8)])
def test_cores_are_those_that_the_quota_grants(tmp_path: Path, limit: str, cores: int) -> None:
    """CPU time by period, rounded up; no limit and no readable one leave what the process may run on."""
    write(tmp_path / "cpu.max", f"{limit}\n")
    assert available_cores(tmp_path, own(tmp_path, NOBODY)) == cores


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize(("quota", "cores"), [(3 * PERIOD, 3), (3 * PERIOD + 1, 4), (-1, 8)])
def test_cores_of_version_1(tmp_path: Path, quota: int, cores: int) -> None:
    """Quota and period lie in two files of the controller's own tree; -1 is no limit."""
    write(tmp_path / "cpu,cpuacct" / "jobs" / "cpu.cfs_quota_us", f"{quota}\n")
    write(tmp_path / "cpu,cpuacct" / "jobs" / "cpu.cfs_period_us", f"{PERIOD}\n")
    assert available_cores(tmp_path, own(tmp_path, "3:cpuset:/\n1:cpu,cpuacct:/jobs\n0::/\n")) == cores


@pytest.mark.usefixtures("many")
def test_a_group_is_bound_by_those_around_it(tmp_path: Path) -> None:
    """The tightest quota on the way up counts, and that of a neighbour does not."""
    told = own(tmp_path, "0::/outer/inner\n")
    write(tmp_path / "outer" / "inner" / "cpu.max", f"{6 * PERIOD} {PERIOD}\n")
    write(tmp_path / "neighbour" / "cpu.max", f"{PERIOD} {PERIOD}\n")
    assert available_cores(tmp_path, told) == 6
    write(tmp_path / "outer" / "cpu.max", f"{4 * PERIOD} {PERIOD}\n")
    assert available_cores(tmp_path, told) == 4
    write(tmp_path / "cpu.max", f"{2 * PERIOD} {PERIOD}\n")
    assert available_cores(tmp_path, told) == 2


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("told", ["0::/host/name/of/it\n", "1:cpu:/host/name\n", "0::/../../elsewhere\n", "", "odd\n"])
def test_a_container_that_sees_its_own_group_as_the_topmost_one(tmp_path: Path, told: str) -> None:
    """The name that the host has for it is not there: the files at the top count."""
    write(tmp_path / "cpu.max", f"{2 * PERIOD} {PERIOD}\n")
    write(tmp_path / "cpu" / "cpu.cfs_quota_us", f"{5 * PERIOD}\n")
    write(tmp_path / "cpu" / "cpu.cfs_period_us", f"{PERIOD}\n")
    assert available_cores(tmp_path, own(tmp_path, told)) == 2
    (tmp_path / "cpu.max").unlink()
    assert available_cores(tmp_path, own(tmp_path, told)) == 5


def test_a_system_that_binds_no_process_to_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There all cores of the machine may be used."""
    monkeypatch.delattr(os, "sched_getaffinity")
    assert available_cores(tmp_path, tmp_path / "nothing") == os.cpu_count()


def test_kv_memory_by_default_is_a_share_of_what_is_free(tmp_path: Path) -> None:
    """A quarter, divided among the processes of the host; a control group's limit counts."""
    assert default_kv_memory(2, 8 << 30) == 1 << 30
    assert default_kv_memory(1, 0) == 1
    told = own(tmp_path, NOBODY)
    write(tmp_path / "memory.max", "5000\n")
    write(tmp_path / "memory.current", "2000\n")
    assert available_memory(tmp_path, own=told) == 3000
    write(tmp_path / "memory.stat", "anon 1500\ninactive_file 400\n")
    assert available_memory(tmp_path, own=told) == 3400
    write(tmp_path / "meminfo", "MemFree:  1 kB\nMemAvailable:  3 kB\n")
    assert available_memory(tmp_path, tmp_path / "meminfo", told) == 3 << 10
    write(tmp_path / "memory.max", "max\n")
    assert available_memory(tmp_path, own=told) > 3400


def test_memory_is_what_the_tightest_group_leaves(tmp_path: Path) -> None:
    """A group and those around it count, in either version; one that is full leaves nothing."""
    told = own(tmp_path, "5:memory:/jobs/one\n0::/\n")
    for place, limit, used in (("jobs/one", 9000, 1000), ("jobs", 5000, 2000)):
        write(tmp_path / "memory" / place / "memory.limit_in_bytes", f"{limit}\n")
        write(tmp_path / "memory" / place / "memory.usage_in_bytes", f"{used}\n")
    assert available_memory(tmp_path, own=told) == 3000
    write(tmp_path / "memory" / "jobs" / "memory.stat", "total_inactive_file 700\n")
    assert available_memory(tmp_path, own=told) == 3700
    write(tmp_path / "memory" / "jobs" / "memory.usage_in_bytes", "6000\n")
    assert available_memory(tmp_path, own=told) == 0
