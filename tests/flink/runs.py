"""Runs of one workload, on the cluster and on the local runner, with the moments at which tests strike.

Owns starting the command, waiting for it, and the table's lines.  Does not know what is right: see `workloads`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from batchgen_beam.transforms.progress_files import ProgressSample, total
from tests.flink.cluster import ROOT, Cluster
from tests.flink.rest import wait_for
from tests.flink.workloads import Job, fed_fill

__all__ = ["Bench", "Run"]

RUN_SECONDS = 900.0
LOCAL = "local"
DURABLE = ("--flush-interval=0.3", "--checkpoint-interval=0.5")
"""What is found is stored at once, so that a test need not wait for half a minute of work to lose."""


class Run:
    """The command under way on the cluster."""

    def __init__(self, job: Job, cluster: Cluster, output: str, log: str) -> None:
        self.output = output
        self._job = job
        self._cluster = cluster
        self._log = log
        self._began = time.monotonic()
        self._known = set(cluster.rest.jobs())
        self._client = cluster.client(job.arguments(output, *DURABLE, *cluster.flags), log)

    def flink_job(self) -> str:
        """The id of the run's Flink job, once there is one."""
        return wait_for("the run's Flink job", lambda: next(iter(set(self._cluster.rest.jobs()) - self._known), None),
                        RUN_SECONDS)

    def when_answered(self, rows: int) -> None:
        """Wait until the engines of this run have done so many rows."""
        def reached() -> bool:
            assert self._client.poll() is None, self.words()
            return total(self._job.samples(self.output)).engine.rows_done >= rows
        wait_for(f"{rows} rows answered", reached, RUN_SECONDS, every=0.05)

    def kill_engine(self) -> None:
        """SIGKILL the worker process whose engine has done most, which so has more to lose."""
        busiest = max(self._job.samples(self.output), key=lambda one: one.engine.rows_done)
        self._cluster.kill_sdk_worker(int(busiest.process.split("-")[-2]))

    def kill_client(self) -> None:
        """SIGKILL the command that the user started."""
        os.kill(self._client.pid, signal.SIGKILL)
        self._client.wait(timeout=30)

    def interrupt(self) -> int:
        """Ctrl-C; returns the exit code."""
        self._client.send_signal(signal.SIGINT)
        return self._client.wait(timeout=60)

    def ended(self) -> float:
        """Wait for the end, which must be a good one; seconds since the start."""
        assert self._client.wait(timeout=RUN_SECONDS) == 0, self.words()
        return time.monotonic() - self._began

    def words(self) -> str:
        """The last that the command said."""
        return "\n".join(self._cluster.log(self._log).read_text(errors="replace").splitlines()[-40:])


class Bench:
    """A job, the cluster, and the lines of the table."""

    def __init__(self, job: Job, cluster: Cluster, table: list[str]) -> None:
        self.job = job
        self.cluster = cluster
        self._table = table

    def start(self, output: str) -> Run:
        """The command, with the cluster's flags; its words go to a log of their own."""
        log = f"{self.job.workload.name}-{output}-{len(self.cluster.rest.jobs())}".replace(" ", "-")
        return Run(self.job, self.cluster, output, log)

    def local_rows(self) -> Sequence[dict[str, Any]]:
        """The rows that the same command without the cluster's flags publishes; run once."""
        if not (self.job.folder / LOCAL / "_SUCCESS").exists():
            began = time.monotonic()
            done = subprocess.run(
                [sys.executable, "-m", "batchgen_beam.pipelines.main", *self.job.arguments(LOCAL, *DURABLE)],
                cwd=self.job.folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
                timeout=RUN_SECONDS, check=False)
            assert done.returncode == 0, done.stderr
            self.tell("local runner", time.monotonic() - began, self.job.samples(LOCAL))
        return self.job.rows(LOCAL)

    def tell(self, what: str, seconds: float, samples: Sequence[ProgressSample]) -> None:
        """One line of the table, and one for each process that had an engine."""
        self._table.append(f"{self.job.workload.name}, {what}: {seconds:.0f} s in all")
        for one in samples:
            engine = one.engine
            self._table.append(
                f"    {one.process}: {one.engines} load, {one.answered} rows in {engine.busy_seconds:.1f} s busy, up "
                f"to {engine.lanes_peak} lanes at once, fill {100 * fed_fill(one):.1f} % over {engine.fed_steps} fed "
                f"steps, {100 * one.fill:.1f} % over all {engine.steps}")
