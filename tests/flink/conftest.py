"""The cluster that the tests of this folder share, and the table of what their runs took."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.flink.cluster import Cluster, Tools
from tests.flink.runs import Bench
from tests.flink.workloads import FAKE, TINY, Job

TABLE = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """The lines of the table."""
    config.stash[TABLE] = []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table, where there was a run."""
    if config.stash[TABLE]:
        terminalreporter.section("runs on the cluster and on the local runner")
        for line in config.stash[TABLE]:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A JobManager, two TaskManagers of two slots, a job server; a test that kills one of them replaces it."""
    tools = Tools()
    if missing := tools.missing():
        pytest.fail("\n".join(missing), pytrace=False)
    with Cluster(tmp_path_factory.mktemp("flink") / "cluster", tools) as running:
        yield running


@pytest.fixture
def idle_cluster(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, with all its slots free before and after: a job that a test left going on is cancelled."""
    cluster.settle()
    yield cluster
    cluster.settle()


@pytest.fixture(scope="session", params=[FAKE, TINY], ids=lambda workload: workload.name)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """One of the two workloads, its input and model written."""
    return Job(request.param, tmp_path_factory.mktemp("job"))


@pytest.fixture
def bench(job: Job, idle_cluster: Cluster, request: pytest.FixtureRequest) -> Bench:
    """What a test runs its job with; the local run is made by whoever asks first."""
    return Bench(job, idle_cluster, request.config.stash[TABLE])
