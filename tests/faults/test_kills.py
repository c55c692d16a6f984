"""The law of durability: whenever a command is killed, the same command ends with the answers of an undisturbed run.

    make faults KILLS=200 SEED=1

does it so many times; without these, 20 times on a job of about 2 seconds.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from batchgen_beam.pipelines.main import OK
from tests.faults.conftest import Reference, make_reference
from tests.faults.job import run_figures
from tests.faults.kills import KillPool, Kind, kill_at, plan_kills, run_names

KILLS = int(os.environ.get("KILLS", "20"))
SEED = int(os.environ.get("SEED", "1"))
FULL = KILLS >= 100
SIDE_BY_SIDE = 2

pytestmark = pytest.mark.timeout(300 + 60 * KILLS)


def tell(line: str) -> None:
    """One line at once, for whoever watches for half an hour."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@dataclass
class Suite:
    """Kills on one output after another, until none is left."""

    reference: Reference
    folder: Path
    pool: KillPool
    outputs: itertools.count[int] = field(default_factory=itertools.count)
    resumed: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def run(self) -> None:
        """All kills, told as they are done."""
        tell(f"\n{KILLS} kills, seed {SEED}; the job generates for {self.reference.busy_seconds:.1f} s")
        with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
            for worker in [threads.submit(self.work) for _ in range(SIDE_BY_SIDE)]:
                worker.result()
        for name, count in self.pool.histogram().items():
            tell(f"{count:4} {name}")
        tell(f"{sum(self.resumed):4} runs resumed rows from continuations")

    def work(self) -> None:
        """One of the threads."""
        while not self.faults and (kills := self.pool.sequence()):
            output = self.folder / f"out-{next(self.outputs)}"
            names = []
            while kills:
                done, missed = kill_at(self.reference.job, output, kills)
                kills = kills[len(missed) + 1:]
                self.pool.put_back(missed)
                if done is None:
                    break
                self.pool.record(done)
                names.append(done.name)
            faults = self._end(output)
            tell(f"{output.name}: {', '.join(names)}: {faults or 'all bits are equal'}")

    def _end(self, output: Path) -> list[str]:
        """The same command once more, which nobody disturbs; what is wrong then."""
        ended = self.reference.job.run(output)
        figures = run_figures(output, run_names(output))
        self.resumed.append(sum(run["resumed_rows"] > 0 for run in figures.values()))
        found = [] if ended.code == OK else [f"exit {ended.code}: {ended.err[-2000:]}"]
        found += found or self.reference.faults(output)
        self.faults += [f"{output.name}: {line}" for line in found]
        if not found:
            shutil.rmtree(output)
        return found


def test_killed_anywhere_the_same_command_ends_with_the_same_bits(
        reference: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 rows lost, 0 doubled, 0 changed, counts that balance; rows under way go on from where they were."""
    used = make_reference(tmp_path, rows=32, most=420) if FULL else reference
    plan = plan_kills(KILLS, used.job.units, SEED)
    suite = Suite(used, tmp_path, KillPool(plan))
    with capsys.disabled():
        suite.run()
    assert suite.faults == []
    assert Counter(suite.pool.done) == Counter(plan)
    assert len(plan) == KILLS
    assert sum(suite.resumed) >= KILLS * 3 // 10


@pytest.mark.parametrize("count", [20, 100, 200, 333])
@pytest.mark.parametrize("seed", [1, 2])
def test_kills_are_spread_over_all_that_a_command_does(count: int, seed: int) -> None:
    """Of 200 at least 120 while generating, 40 in publishing, 10 each in compaction and before a rename; by chance."""
    kills = plan_kills(count, units=8, seed=seed)
    found = Counter(kill.kind for kill in kills)
    assert found.total() == count
    assert found[Kind.GENERATING] >= count * 6 // 10
    assert found[Kind.PUBLISHING] >= count // 5
    assert found[Kind.COMPACTING] >= count // 20
    assert found[Kind.RENAMING_PART] + found[Kind.RENAMING_UNIT] >= count // 20
    assert plan_kills(count, units=8, seed=seed) == kills != plan_kills(count, units=8, seed=seed + 1)
