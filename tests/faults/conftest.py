"""The jobs of the fault suite and what they publish when nothing disturbs them; the small one is made once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from batchgen_beam.pipelines.main import OK
from tests.faults.compare import differences, unbalanced
from tests.faults.job import Job, make_job
from tests.support.jobs import engine_figures


@dataclass(frozen=True)
class Reference:
    """A job, and the output of an undisturbed run of it."""

    job: Job
    output: Path

    @property
    def busy_seconds(self) -> float:
        """So long it generates, where it is the only one to run."""
        seconds: float = engine_figures(self.output)["busy_seconds"]
        return seconds

    def faults(self, output: Path) -> list[str]:
        """What is wrong with a finished output: nothing if it holds the same bits and its counts balance."""
        return [*differences(self.output, output), *unbalanced(output, self.job.rows)]


def make_reference(folder: Path, *, rows: int, most: int) -> Reference:
    """A job of so many rows, which end after `most` tokens or before, once undisturbed."""
    job = make_job(folder, rows=rows, most=most)
    output = folder / "undisturbed"
    ended = job.run(output)
    assert ended.code == OK, ended.err
    assert unbalanced(output, rows) == []
    return Reference(job, output)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """A job of about 2 seconds."""
    return make_reference(tmp_path_factory.mktemp("faults"), rows=16, most=300)
