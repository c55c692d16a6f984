"""Laws of a run on a real Flink cluster: two TaskManagers of two slots, one worker process and engine in each.

Whatever dies, the same command comes to the rows of the undisturbed local run, bit by bit, in the input's order.
`make test-flink` runs these; they take minutes each on two cores.
"""

from __future__ import annotations

import pytest

from batchgen_beam.pipelines.interrupts import INTERRUPTED
from tests.flink.runs import Bench
from tests.flink.workloads import FAKE, TINY, check_engines, check_spread, check_work

pytestmark = [pytest.mark.flink, pytest.mark.timeout(2400)]

PART = 4
"""Faults strike when one row in so many is answered."""


def test_all_rows_come_in_order_from_full_engines(bench: Bench) -> None:
    """One load for each TaskManager's process, both slots feed it, its batch is full while there are rows."""
    expected = bench.local_rows()
    seconds = bench.start("undisturbed").ended()
    samples = bench.job.samples("undisturbed")
    bench.tell("cluster", seconds, samples)
    bench.job.check_rows("undisturbed", expected)
    check_engines(samples, at_least=2)
    assert len(samples) == 2
    check_spread(samples)


def test_a_killed_worker_process_costs_only_time(bench: Bench) -> None:
    """Flink runs the stage again in new processes; what the old ones had stored is not computed again."""
    expected = bench.local_rows()
    run = bench.start("worker-killed")
    run.when_answered(bench.job.workload.rows // PART)
    run.kill_engine()
    seconds = run.ended()
    samples = bench.job.samples("worker-killed")
    bench.tell("a worker process killed", seconds, samples)
    bench.job.check_rows("worker-killed", expected)
    check_engines(samples, at_least=4)
    check_work(bench.job, samples)


def test_a_killed_task_manager_costs_only_time(bench: Bench) -> None:
    """With all its processes, as when a machine goes; the job waits for the one that takes its place."""
    expected = bench.local_rows()
    run = bench.start("manager-killed")
    run.when_answered(bench.job.workload.rows // PART)
    bench.cluster.kill_task_manager(bench.cluster.task_managers()[0])
    bench.cluster.start_task_manager()
    seconds = run.ended()
    samples = bench.job.samples("manager-killed")
    bench.tell("a TaskManager killed and replaced", seconds, samples)
    bench.job.check_rows("manager-killed", expected)
    check_engines(samples, at_least=4)
    check_work(bench.job, samples)


def test_a_killed_job_goes_on_where_it_stood_when_it_is_run_again(bench: Bench) -> None:
    """Client and Flink job gone, the same command pays only for what is missing."""
    expected = bench.local_rows()
    run = bench.start("job-killed")
    run.when_answered(bench.job.workload.rows // PART)
    run.kill_client()
    assert bench.cluster.rest.cancel(run.flink_job()) == "CANCELED"
    first = bench.job.samples("job-killed")
    bench.tell("job killed", 0.0, first)
    seconds = bench.start("job-killed").ended()
    samples = bench.job.samples("job-killed")
    bench.tell("the same command again", seconds, samples)
    bench.job.check_rows("job-killed", expected)
    check_engines(samples, at_least=2)
    check_work(bench.job, [*first, *samples])


@pytest.mark.parametrize("job", [TINY], indirect=True, ids=["tiny Llama"])
def test_an_interrupted_command_goes_on_where_it_stood(bench: Bench) -> None:
    """Exit 130.  Beam's job server is told to cancel, forgets the job and leaves it to Flink, where users cancel it."""
    expected = bench.local_rows()
    run = bench.start("interrupted")
    run.when_answered(bench.job.workload.rows // PART)
    assert run.interrupt() == INTERRUPTED, run.words()
    bench.cluster.settle()
    first = bench.job.samples("interrupted")
    bench.tell("interrupted", 0.0, first)
    seconds = bench.start("interrupted").ended()
    samples = bench.job.samples("interrupted")
    bench.tell("the same command again", seconds, samples)
    bench.job.check_rows("interrupted", expected)
    check_work(bench.job, [*first, *samples])


@pytest.mark.parametrize("job", [FAKE], indirect=True, ids=["fake model"])
def test_a_job_whose_client_died_and_its_successor_do_no_harm(bench: Bench) -> None:
    """The user runs the command again while Flink still works on the first; both end well."""
    expected = bench.local_rows()
    run = bench.start("client-killed")
    run.when_answered(bench.job.workload.rows // PART)
    run.kill_client()
    seconds = bench.start("client-killed").ended()
    assert bench.cluster.rest.ended(run.flink_job(), timeout=60) == "FINISHED"
    bench.tell("run again while the first job went on", seconds, bench.job.samples("client-killed"))
    bench.job.check_rows("client-killed", expected)
