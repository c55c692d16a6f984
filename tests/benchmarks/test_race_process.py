"""One process of the race: its result is read, lengths are checked, the limit kills the tree, CPU is told apart."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from benchmarks.race.engines import Engine, engine
from benchmarks.race.process import ROOT, Conditions, run_engine
from benchmarks.race.watch import Sample, usage
from benchmarks.race.workloads import Row, Workload
from tests.weights.tiny_checkpoint import tensors, write_single

WORKLOAD = Workload(name="tiny", rows=(Row(uuid="a", prompt_ids=(3, 4, 5), max_tokens=4),
                                       Row(uuid="b", prompt_ids=(6, 7), max_tokens=2)))

ENGINE = """
    class Engine:
        def generate(self, rows):
            {generate}
        def facts(self):
            return {{"version": 1}}
        def close(self):
            pass

    def load(job):
        return Engine()
"""


@pytest.fixture
def conditions(tmp_path: Path) -> Conditions:
    """Of a tiny model, two rows at once."""
    folder = write_single(tmp_path / "model", tensors())
    (tmp_path / "out").mkdir()
    return Conditions(home=tmp_path, folder=folder, out=tmp_path / "out", threads=1, cores=os.cpu_count() or 1,
                      active_rows=2, kv_gib=1, limit=60)


def adapter(folder: Path, generate: str) -> Engine:
    """An engine in the project's environment whose answers are this statement's."""
    file = folder / "adapter.py"
    file.write_text(textwrap.dedent(ENGINE.format(generate=generate)))
    return Engine(name="other", environment="project", adapter=str(file.with_suffix("")), model="folder", settings={})


def test_our_engine_answers_with_exact_lengths(conditions: Conditions) -> None:
    """The adapter of our engine, for real, on a model of a few hundred numbers."""
    done = run_engine(engine("ours"), WORKLOAD, conditions, "ours")
    assert done.outcome == "ok", (conditions.out / "ours.log").read_text()
    assert done.ids is not None
    assert [len(ids) for ids in done.ids] == [4, 2]
    assert done.figures["facts"]["max_rows"] == 2
    assert done.figures["load_seconds"] > 0
    assert done.figures["peak_rss_mib"] > 50


def test_wrong_lengths_fail(conditions: Conditions) -> None:
    """An answer one id short is no answer."""
    short = adapter(conditions.home, "return [[1] * (row['max_tokens'] - 1) for row in rows]")
    assert run_engine(short, WORKLOAD, conditions, "short").outcome.startswith("failed: 2 rows have another length")


def test_an_adapter_that_raises_fails_with_its_log(conditions: Conditions) -> None:
    """The outcome names the log, which holds the trace."""
    done = run_engine(adapter(conditions.home, "raise KeyError('broken')"), WORKLOAD, conditions, "bad")
    assert done.outcome == "failed with code 1, see bad.log"
    assert "broken" in (conditions.out / "bad.log").read_text()


def test_the_limit_kills_the_tree(conditions: Conditions) -> None:
    """The process and its child are gone soon after the limit."""
    child = conditions.home / "child"
    sleeper = adapter(conditions.home, f"import subprocess, time; p = subprocess.Popen(['sleep', '60']); "
                                       f"open({str(child)!r}, 'w').write(str(p.pid)); time.sleep(60)")
    limited = Conditions(**{**{name: getattr(conditions, name) for name in Conditions.__slots__}, "limit": 2})
    started = time.monotonic()
    assert run_engine(sleeper, WORKLOAD, limited, "late").outcome == "over 2 s"
    assert time.monotonic() - started < 15
    while is_running(int(child.read_text())):  # a signal may take a moment; the child by itself would take a minute
        assert time.monotonic() - started < 15
        time.sleep(0.05)


def is_running(process: int) -> bool:
    """Neither gone nor dead and waiting for its parent."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_memory_is_touched_by_another_process() -> None:
    """One that really has so much in memory at once, and is gone afterwards."""
    program = ("import resource; from benchmarks.race.process import warm_memory; warm_memory(1); "
               "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, "
               "int(open('/proc/self/statm').read().split()[1]) * resource.getpagesize() >> 10)")
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT)
    touched, kept = map(int, done.stdout.split())
    assert kept < 1 << 20 <= touched  # KiB


def test_usage_is_what_others_used_within_the_window() -> None:
    """Values between samples lie on a line; the watcher's own time is nobody's."""
    samples = [Sample(at=float(at), own=1.5 * at, watcher=0.1 * at, busy=1.8 * at, resident=0)
               for at in range(0, 12, 2)]
    used = usage(samples, 1.0, 6.0, 2)
    assert used.own == pytest.approx(7.5)
    assert used.others == pytest.approx(1.0)
    assert used.share == pytest.approx(0.1)
