"""Laws of rows that kill their process: the others are answered, the row is told, and nobody has to look for it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from batchgen_beam.pipelines.main import OK, ROWS_FAILED, main
from batchgen_beam.text.fake_folder import write_fake_folder
from tests.faults.abort_kernel import DEADLY
from tests.faults.compare import differences, unbalanced
from tests.faults.job import DURABLE, Job
from tests.support.jobs import FLAGS, published, questions, timeless, write_rows

pytestmark = pytest.mark.timeout(600)

MOST_RESTARTS = 5


def deadly_job(folder: Path) -> Job:
    """40 rows, one of which holds the deadly letter."""
    rows = questions(40)
    rows[17]["prompt"] += DEADLY
    write_rows(folder / "in" / "a.parquet", rows, row_group_size=10)
    write_fake_folder(folder / "model")
    return Job(folder=folder, rows=len(rows), units=4, flags=(*FLAGS, *DURABLE),
               module="tests.faults.abort_kernel")


def test_case_54_a_row_that_kills_its_process_is_answered_with_an_error(tmp_path: Path) -> None:
    """Case 54: attempts of a row are bounded and recorded; all other rows have their answers, the counts balance.

    A kernel calls `abort()` on one token id; the command is started again until it ends, 5 times at most.
    """
    job = deadly_job(tmp_path)
    output = tmp_path / "out"
    codes = [job.run(output).code]
    while codes[-1] == -signal.SIGABRT and len(codes) <= MOST_RESTARTS:
        codes.append(job.run(output).code)
    assert codes == [*[-signal.SIGABRT] * (len(codes) - 1), ROWS_FAILED]
    assert unbalanced(output, job.rows) == []
    [failure] = published(output, "failures")
    assert (failure["uuid"], failure["code"]) == ("id-17", "ENGINE_ERROR")
    assert "--retry-failed=ENGINE_ERROR" in failure["message"]

    # The row is harmless for a kernel that is mended; a plain run does not try it.
    undisturbed = tmp_path / "undisturbed"
    assert main(job.arguments(output)) == ROWS_FAILED
    assert main(job.arguments(undisturbed)) == OK
    assert timeless(published(output)) == [row for row in timeless(published(undisturbed)) if row["uuid"] != "id-17"]
    assert main([*job.arguments(output), "--retry-failed=ENGINE_ERROR"]) == OK
    assert differences(undisturbed, output) == []
