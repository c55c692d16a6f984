"""Laws of a run on a real Flink cluster: two TaskManagers of two slots, one worker process and engine in each.

Whatever dies, the same command comes to the rows of the undisturbed local run, bit by bit, in the input's order.
`make test-flink` runs these; they take minutes each on two cores.
"""

from __future__ import annotations

import pytest

from tests.flink.runs import Bench
from tests.flink.workloads import check_engines

pytestmark = [pytest.mark.flink, pytest.mark.timeout(2400)]


def test_all_rows_come_in_order_from_full_engines(bench: Bench) -> None:
    """One load for each TaskManager's process, both slots feed it, its batch is full while there are rows."""
    expected = bench.local_rows()
    seconds = bench.start("undisturbed").ended()
    samples = bench.job.samples("undisturbed")
    bench.tell("cluster", seconds, samples)
    bench.job.check_rows("undisturbed", expected)
    check_engines(samples, processes=2)
