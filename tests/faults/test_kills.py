"""The law of durability: whenever a command is killed, the same command ends with the answers of an undisturbed run.

    make faults KILLS=200 SEED=1

does it so many times; without these, 20 times on a job of about 2 seconds.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from batchgen_beam.pipelines.main import OK
from tests.faults.compare import differences, unbalanced
from tests.faults.job import Job, make_job, run_figures
from tests.faults.kills import KillPool, Kind, kill_at, plan_kills, run_names

KILLS = int(os.environ.get("KILLS", "20"))
SEED = int(os.environ.get("SEED", "1"))
FULL = KILLS >= 100
SIDE_BY_SIDE = 2

pytestmark = pytest.mark.timeout(300 + 60 * KILLS)


@dataclass
class Suite:
    """Kills on one output after another, until none is left."""

    job: Job
    undisturbed: Path
    pool: KillPool
    outputs: itertools.count[int] = field(default_factory=itertools.count)
    resumed: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def work(self) -> None:
        """One of the threads."""
        while not self.faults and (kills := self.pool.sequence()):
            output = self.job.folder / f"out-{next(self.outputs)}"
            while kills:
                done, missed = kill_at(self.job, output, kills)
                kills = kills[len(missed) + 1:]
                self.pool.put_back(missed)
                if done is None:
                    break
                self.pool.record(done)
            self._end(output)

    def _end(self, output: Path) -> None:
        """The same command once more, which nobody disturbs."""
        ended = self.job.run(output)
        figures = run_figures(output, run_names(output))
        self.resumed.append(sum(run["resumed_rows"] > 0 for run in figures.values()))
        found = [] if ended.code == OK else [f"exit {ended.code}: {ended.err[-2000:]}"]
        found += found or [*differences(self.undisturbed, output), *unbalanced(output, self.job.rows)]
        self.faults += [f"{output.name}: {line}" for line in found]
        if not found:
            shutil.rmtree(output)


def test_killed_anywhere_the_same_command_ends_with_the_same_bits(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 rows lost, 0 doubled, 0 changed, counts that balance; rows under way go on from where they were."""
    job = make_job(tmp_path, rows=32, most=420) if FULL else make_job(tmp_path, rows=16, most=300)
    undisturbed = tmp_path / "undisturbed"
    assert job.run(undisturbed).code == OK
    assert unbalanced(undisturbed, job.rows) == []
    suite = Suite(job, undisturbed, KillPool(plan_kills(KILLS, job.units, SEED)))
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        for worker in [threads.submit(suite.work) for _ in range(SIDE_BY_SIDE)]:
            worker.result()
    with capsys.disabled():
        lines = [f"{count:4} {name}" for name, count in suite.pool.histogram().items()]
        sys.stdout.write("\n".join([f"\n{KILLS} kills, seed {SEED}:", *lines,
                                    f"{sum(suite.resumed):4} runs resumed rows from continuations", ""]))
    assert suite.faults == []
    assert len(suite.pool.done) == KILLS
    assert sum(suite.resumed) >= KILLS * 3 // 10
    generating = [kill for kill in suite.pool.done if kill.kind is Kind.GENERATING]
    assert len(generating) >= KILLS * 6 // 10
