"""The small job of the fault suite, and what it publishes when nothing disturbs it; made once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from batchgen_beam.pipelines.main import OK
from tests.faults.compare import differences, unbalanced
from tests.faults.job import Job, make_job


@dataclass(frozen=True)
class Reference:
    """A job that generates for about 2 seconds, and the output of an undisturbed run of it."""

    job: Job
    output: Path

    def faults(self, output: Path) -> list[str]:
        """What is wrong with a finished output: nothing if it holds the same bits and its counts balance."""
        return [*differences(self.output, output), *unbalanced(output, self.job.rows)]


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """See the class."""
    job = make_job(tmp_path_factory.mktemp("faults"), rows=16, most=300)
    output = job.folder / "undisturbed"
    ended = job.run(output)
    assert ended.code == OK, ended.err
    assert unbalanced(output, job.rows) == []
    return Reference(job, output)
