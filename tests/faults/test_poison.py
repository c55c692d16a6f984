"""Laws of rows that kill their process: the others are answered, the row is told, and nobody has to look for it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from batchgen_beam.pipelines.main import ROWS_FAILED
from batchgen_beam.text.fake_folder import write_fake_folder
from tests.faults.abort_kernel import DEADLY
from tests.faults.compare import unbalanced
from tests.faults.job import DURABLE, Job
from tests.support.jobs import FLAGS, published, questions, timeless, write_rows

pytestmark = pytest.mark.timeout(600)

MOST_RESTARTS = 5


def fake_job(folder: Path, *, module: str) -> Job:
    """40 rows, one of which holds the deadly letter where `module` knows it."""
    rows = questions(40)
    rows[17]["prompt"] += DEADLY
    write_rows(folder / "in" / "a.parquet", rows, row_group_size=10)
    write_fake_folder(folder / "model")
    return Job(folder=folder, rows=len(rows), units=4, flags=(*FLAGS, *DURABLE), module=module)


def test_case_54_a_row_that_kills_its_process_is_answered_with_an_error(tmp_path: Path) -> None:
    """Case 54: attempts of a row are bounded and recorded; all other rows have their answers, the counts balance.

    A kernel calls `abort()` on one token id; the command is started again until it ends, 5 times at most.
    """
    job = fake_job(tmp_path, module="tests.faults.abort_kernel")
    output = tmp_path / "out"
    codes = [job.run(output).code]
    while codes[-1] == -signal.SIGABRT and len(codes) <= MOST_RESTARTS:
        codes.append(job.run(output).code)
    assert codes == [*[-signal.SIGABRT] * (len(codes) - 1), ROWS_FAILED]
    assert unbalanced(output, job.rows) == []
    [failure] = published(output, "failures")
    assert (failure["uuid"], failure["code"]) == ("id-17", "ENGINE_ERROR")
    assert "--retry-failed=ENGINE_ERROR" in failure["message"]

    # The row is harmless for a kernel that is mended, and a plain run does not try it.
    mended = fake_job(tmp_path, module="batchgen_beam.pipelines.main")
    assert mended.run(output).code == ROWS_FAILED
    undisturbed = tmp_path / "undisturbed"
    assert mended.run(undisturbed).code == 0
    assert timeless(published(output)) == [row for row in timeless(published(undisturbed)) if row["uuid"] != "id-17"]
    again = Job(folder=job.folder, rows=job.rows, units=job.units, flags=(*job.flags, "--retry-failed=ENGINE_ERROR"))
    assert again.run(output).code == 0
    assert timeless(published(output)) == timeless(published(undisturbed))
    assert not published(output, "failures")
