"""A real Flink cluster on this machine: a JobManager, TaskManagers with two slots each, and Beam's job server.

Owns the processes, their settings and the flags with which a run is sent to it.  Everything it writes lies in one
scratch folder (Beam's boot program writes into its working folder), ports are chosen free, every wait has a time-out,
and all its processes end with this one.  No Flink distribution is needed: the programs' main classes are started from
one class path, which `tests/flink/pom.xml` names and `make test-flink` fetches.

The registry's job server is older than the Python Beam of this package: Flink 1.19.0 and Beam Java 2.62 against Python
2.77.  Users take the job server of their Beam release; BEAM_FLINK_JARS may name a folder with another set of jars.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from tests.flink.rest import FlinkRest, TaskManager, wait_for
from tests.flink.sessions import Sessions, processes_of, wait_gone

__all__ = ["CACHE", "Cluster", "Tools"]

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache"
BOOT_SCRIPT = Path(__file__).with_name("boot.sh")

SLOTS = 2
START_SECONDS = 120.0
REGISTER_SECONDS = 120.0
END_SECONDS = 20.0

MIB = {"task.heap": 384, "framework.heap": 128, "framework.off-heap": 128, "managed": 128, "network": 256}
"""A TaskManager's memory: what Flink's own start script would compute has to be said part by part."""

OPENED = (
    "java.lang", "java.lang.invoke", "java.lang.reflect", "java.io", "java.math", "java.net", "java.nio", "java.text",
    "java.time", "java.util", "java.util.concurrent", "java.util.concurrent.atomic", "java.util.concurrent.locks",
    "sun.net.util", "sun.nio.ch", "sun.security.action")
"""Packages that Flink's serialisers look into; Java 17 has to be told."""

JOB_MANAGER = "org.apache.flink.runtime.entrypoint.StandaloneSessionClusterEntrypoint"
TASK_MANAGER = "org.apache.flink.runtime.taskexecutor.TaskManagerRunner"
SDK_WORKER = "apache_beam.runners.worker.sdk_worker_main"
JOB_SERVER = "org.apache.beam.runners.flink.FlinkJobServerDriver"


class Tools:
    """What a cluster is made of, found where the environment or `make test-flink` put it."""

    def __init__(self) -> None:
        self.jars = Path(os.environ.get("BEAM_FLINK_JARS", CACHE / "flink" / "jars")).absolute()
        self.boot = Path(os.environ.get("BEAM_BOOT", CACHE / "bin" / "beam-boot")).absolute()
        self.java = shutil.which("java") or "java"

    def missing(self) -> list[str]:
        """A line for each thing that is not there, with the remedy."""
        lines = []
        if shutil.which(self.java) is None:
            lines.append("no java on PATH: install a Java runtime, version 11 or 17")
        if not any(self.jars.glob("beam-runners-flink-*.jar")):
            lines.append(f"no Flink jars in {self.jars}: run `make test-flink`, or set BEAM_FLINK_JARS")
        if find_spec("pip") is None:
            lines.append(f"no pip in {sys.prefix}, which Beam's boot program asks for Beam: run python -m ensurepip")
        if not os.access(self.boot, os.X_OK):
            lines.append(f"no boot program {self.boot}: run `make test-flink`, or set BEAM_BOOT")
        return lines


def free_ports(count: int) -> Iterator[int]:
    """Ports that nobody listens on at this moment."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in sockets]
    yield from ports


class Cluster:
    """The cluster while it is entered.  `folder`: an empty scratch folder.  Logs lie in `folder/log`."""

    def __init__(self, folder: Path, tools: Tools, *, task_managers: int = 2) -> None:
        self.folder = folder
        self._tools = tools
        self._count = task_managers
        self._rest_port, self._rpc_port, self._job_port, self._artifact_port = free_ports(4)
        self._sessions = Sessions()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._started = 0
        self.rest = FlinkRest(f"127.0.0.1:{self._rest_port}")

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._sessions)
            self._write_settings()
            self._start("job-manager", JOB_MANAGER, f"--configDir={self._settings}", "--executionMode=cluster",
                        heap=512)
            self._wait_port(self._rest_port, "job-manager")
            for _ in range(self._count):
                self.start_task_manager(wait=False)
            self._start("job-server", JOB_SERVER, f"--flink-master=127.0.0.1:{self._rest_port}",
                        f"--flink-conf-dir={self._settings}", "--job-host=127.0.0.1", f"--job-port={self._job_port}",
                        f"--artifact-port={self._artifact_port}", "--expansion-port=0",
                        f"--artifacts-dir={self.folder / 'artifacts'}", heap=512)
            self._wait_port(self._job_port, "job-server")
            self.wait_task_managers(self._count)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @property
    def flags(self) -> list[str]:
        """Flags that send a run to this cluster: worker processes beside each TaskManager, one for its two slots."""
        environment = {"command": str(BOOT_SCRIPT), "env": {"BOOT": str(self._tools.boot), "VENV": sys.prefix}}
        return ["--runner=PortableRunner", f"--job_endpoint=127.0.0.1:{self._job_port}",
                f"--artifact_endpoint=127.0.0.1:{self._artifact_port}", "--environment_type=PROCESS",
                f"--environment_config={json.dumps(environment)}", f"--parallelism={SLOTS * self._count}",
                "--sdk_worker_parallelism=1"]

    def client(self, arguments: Sequence[str], log: str) -> subprocess.Popen[bytes]:
        """Start the command as a process that ends with the cluster; what it says goes to `log` among the logs."""
        return self._sessions.start([sys.executable, "-m", "batchgen_beam.pipelines.main", *arguments],
                                    folder=self.folder / "client", log=self.log(log),
                                    environment={"PYTHONPATH": str(ROOT)})

    def log(self, name: str) -> Path:
        """Where a process's words go."""
        return self.folder / "log" / f"{name}.log"

    def start_task_manager(self, *, wait: bool = True) -> str:
        """Start one more TaskManager; returns its name."""
        self._started += 1
        name = f"task-manager-{self._started}"
        settings = {f"taskmanager.memory.{part}.size": f"{size}m" for part, size in MIB.items() if part != "network"}
        words = [word for key, value in {**settings, "taskmanager.resource-id": name}.items()
                 for word in ("-D", f"{key}={value}")]
        direct = MIB["framework.off-heap"] + MIB["network"] + 64
        self._start(name, TASK_MANAGER, f"--configDir={self._settings}", *words,
                    heap=MIB["task.heap"] + MIB["framework.heap"] + 128, more=[f"-XX:MaxDirectMemorySize={direct}m"])
        if wait:
            wait_for(f"{name} at the JobManager", lambda: name in self._names(), REGISTER_SECONDS)
        return name

    def wait_task_managers(self, count: int) -> list[TaskManager]:
        """Wait until so many are registered."""
        return wait_for(f"{count} TaskManagers", lambda: found if len(found := self.rest.task_managers()) == count
                        else None, REGISTER_SECONDS)

    def settle(self) -> None:
        """Cancel every job that still goes on: it would keep its slots, and the next one would wait for them."""
        for job in self.rest.unfinished():
            self.rest.cancel(job)

    def task_managers(self) -> list[str]:
        """Names of those that were started and not killed."""
        return [name for name in self._processes if name.startswith("task-manager")]

    def kill_sdk_worker(self, process: int) -> None:
        """SIGKILL one Python worker."""
        assert any(process in processes_of(self._processes[name].pid, SDK_WORKER) for name in self.task_managers())
        os.kill(process, signal.SIGKILL)
        assert wait_gone([process], END_SECONDS) == []

    def kill_task_manager(self, name: str) -> None:
        """SIGKILL a TaskManager and all that it has started, as when its machine goes."""
        session = self._processes.pop(name).pid
        while left := processes_of(session):
            for process in left:
                os.kill(process, signal.SIGKILL)
            wait_gone(left, END_SECONDS)

    def _names(self) -> set[str]:
        return {manager.name for manager in self.rest.task_managers()}

    @property
    def _settings(self) -> Path:
        return self.folder / "conf"

    def _write_settings(self) -> None:
        network = f"{MIB['network']}m"
        total = sum(MIB.values())
        lines = {
            "jobmanager.rpc.address": "127.0.0.1", "jobmanager.rpc.port": self._rpc_port,
            "jobmanager.bind-host": "127.0.0.1", "jobmanager.memory.process.size": "1g",
            "rest.address": "127.0.0.1", "rest.bind-address": "127.0.0.1", "rest.port": self._rest_port,
            "taskmanager.host": "127.0.0.1", "taskmanager.bind-host": "127.0.0.1",
            "taskmanager.numberOfTaskSlots": SLOTS, "taskmanager.cpu.cores": 1,
            "taskmanager.memory.flink.size": f"{total}m", "taskmanager.memory.task.off-heap.size": "0m",
            "taskmanager.memory.network.min": network, "taskmanager.memory.network.max": network,
            "taskmanager.memory.jvm-metaspace.size": "256m", "taskmanager.memory.jvm-overhead.min": "192m",
            "taskmanager.memory.jvm-overhead.max": "192m",
            "heartbeat.interval": 2000, "heartbeat.timeout": 20_000,
            "restart-strategy.type": "fixed-delay", "restart-strategy.fixed-delay.attempts": 10,
            "restart-strategy.fixed-delay.delay": "2 s",
            "io.tmp.dirs": self.folder / "tmp", "classloader.resolve-order": "parent-first"}
        for name in ("conf", "tmp", "artifacts"):
            (self.folder / name).mkdir(parents=True)
        text = "".join(f"{key}: {value}\n" for key, value in lines.items())
        (self._settings / "flink-conf.yaml").write_text(text)

    def _start(self, name: str, main: str, *arguments: str, heap: int, more: Sequence[str] = ()) -> None:
        opened = [f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED]
        command = [self._tools.java, f"-Xmx{heap}m", f"-Djava.io.tmpdir={self.folder / 'tmp'}",
                   "-Dorg.slf4j.simpleLogger.showDateTime=true", *more, *opened,
                   "-cp", f"{self._tools.jars}/*", main, *arguments]
        self._processes[name] = self._sessions.start(
            command, folder=self.folder / "work" / name, log=self.log(name),
            environment={"TMPDIR": str(self.folder / "tmp"), "PYTHONPATH": str(ROOT)})

    def _wait_port(self, port: int, name: str) -> None:
        def open_now() -> bool:
            if self._processes[name].poll() is not None:
                raise RuntimeError(f"the {name} ended at its start, see {self.log(name)}:\n{self._last_words(name)}")
            with socket.socket() as one:
                return one.connect_ex(("127.0.0.1", port)) == 0
        wait_for(f"port {port} of the {name}", open_now, START_SECONDS)

    def _last_words(self, name: str) -> str:
        return "\n".join(self.log(name).read_text(errors="replace").splitlines()[-20:])
