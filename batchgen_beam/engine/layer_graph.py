"""The tasks of one forward pass, layer by layer, and how long they take on resources that do one thing at a time.

Owns the order in which tasks may run, and a list schedule of them: whatever is ready and has the longest way to the end
goes first, ties by name.  Pure and independent of the order of its input.  Does not know where seconds come from.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["LayerWork", "Resource", "Task", "Timeline", "least_seconds", "pass_tasks", "schedule"]


class Resource(StrEnum):
    """What does one task at a time."""

    COMPUTE = "compute"
    DISK = "disk"
    TO_DEVICE = "host to device"
    TO_HOST = "device to host"


@dataclass(frozen=True, slots=True)
class Task:
    """Work on one resource, which begins when all of `after` have ended."""

    name: str
    resource: Resource
    seconds: float
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A schedule: when it is over, when each task begins, and what each resource works."""

    seconds: float
    starts: Mapping[str, float]
    busy: Mapping[Resource, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """Seconds of one layer's tasks in a pass.

    Attention runs in `sub_batches` of `attention` each; where keys and values lie on the host, each is preceded by
    `restore` and followed by `offload`.  The feed-forward part runs once, in `chunks` pieces of `feed_forward` whose
    weights arrive by `read` (disk) and `copy` (to the device); 0: they are there.  `on_demand`: they are fetched only
    when the router has spoken.  `whole`: the first piece holds the attention's weights too; `attention_read`: they are
    a piece of their own, and arrive so long.  `combine` has all that follows attention and waits for no weights.
    """

    attention: float
    sub_batches: int = 1
    restore: float = 0.0
    offload: float = 0.0
    attention_read: float = 0.0
    combine: float = 0.0
    feed_forward: float
    chunks: int = 1
    read: float = 0.0
    copy: float = 0.0
    on_demand: bool = False
    whole: bool = False

    @property
    def is_streamed(self) -> bool:
        """Whether weights arrive during the pass."""
        return self.read > 0 or self.copy > 0


def least_seconds(layers: Iterable[LayerWork], head: float, buffers: int) -> float:
    """What no schedule of a pass is shorter than: the work of its busiest resource, and the time for which all buffers
    together are taken, from the first byte of a piece to the end of its use."""
    compute, disk, to_device, to_host, held = head, 0.0, 0.0, 0.0, 0.0
    for work in layers:
        compute += work.sub_batches * work.attention + work.combine + work.chunks * work.feed_forward
        disk += work.attention_read + work.chunks * work.read
        to_device += work.chunks * work.copy + work.sub_batches * work.restore
        to_host += work.sub_batches * work.offload
        if work.attention_read:
            held += work.attention_read + work.sub_batches * work.attention
        if work.is_streamed:
            held += work.chunks * (work.read + work.copy + work.feed_forward)
    return max(compute, disk, to_device, to_host, held / buffers)


def pass_tasks(layers: Sequence[LayerWork], head: float, buffers: int) -> Iterator[Task]:
    """The tasks of a pass.

    A piece of weights needs one of `buffers` buffers, which is free again when the piece before it in the ring has been
    used; of keys and values on the host, two sub-batches are on the device at a time.
    """
    used: list[str] = []
    before: tuple[str, ...] = ()
    for index, work in enumerate(layers):
        yield from _layer_tasks(f"{index:04}", work, before, used, buffers)
        before = (f"{index:04}.experts.{work.chunks - 1:04}",)
    yield Task("head", Resource.COMPUTE, head, before)


def _layer_tasks(name: str, work: LayerWork, before: tuple[str, ...], used: list[str],
                 buffers: int) -> Iterator[Task]:
    arrived = [f"{name}.copy.{chunk:04}" for chunk in range(work.chunks)] if work.is_streamed else []
    merged = 1 if not work.restore and not work.offload else work.sub_batches
    seconds = work.attention * work.sub_batches / merged
    own_piece: tuple[str, ...] = ()
    if work.attention_read:
        own_piece = (f"{name}.fetch",)
        yield Task(*own_piece, Resource.DISK, work.attention_read, _free(used, buffers))
        used.append(f"{name}.attention.{merged - 1:04}")
    for sub in range(merged):
        own = f"{name}.attention.{sub:04}"
        after = (*before, *own_piece) if sub == 0 else (f"{name}.attention.{sub - 1:04}",)
        if work.whole and arrived and not sub:
            after = (*after, arrived[0])
        if work.restore:
            freed = (f"{name}.attention.{sub - 2:04}",) if sub > 1 else before
            yield Task(f"{name}.restore.{sub:04}", Resource.TO_DEVICE, work.restore, freed)
            after = (*after, f"{name}.restore.{sub:04}")
        yield Task(own, Resource.COMPUTE, seconds, after)
        if work.offload:
            yield Task(f"{name}.offload.{sub:04}", Resource.TO_HOST, work.offload, (own,))
    combined = f"{name}.combine"
    yield Task(combined, Resource.COMPUTE, work.combine, (f"{name}.attention.{merged - 1:04}",))
    for chunk in range(work.chunks):
        own, after = f"{name}.experts.{chunk:04}", (combined,)
        if chunk:
            after = (f"{name}.experts.{chunk - 1:04}",)
        if arrived:
            yield from _arrival(name, chunk, work, combined, used, buffers)
            used.append(own)
            after = (*after, arrived[chunk])
        yield Task(own, Resource.COMPUTE, work.feed_forward, after)


def _arrival(name: str, chunk: int, work: LayerWork, combined: str, used: Sequence[str],
             buffers: int) -> Iterator[Task]:
    """A piece of weights: from the disk, then to the device, as soon as a buffer is free."""
    free = _free(used, buffers)
    if work.on_demand:
        free = (*free, combined)
    yield Task(f"{name}.read.{chunk:04}", Resource.DISK, work.read, free)
    yield Task(f"{name}.copy.{chunk:04}", Resource.TO_DEVICE, work.copy, (*free, f"{name}.read.{chunk:04}"))


def _free(used: Sequence[str], buffers: int) -> tuple[str, ...]:
    """After which task a piece of weights has a buffer."""
    return (used[-buffers],) if len(used) >= buffers else ()


def schedule(tasks: Iterable[Task]) -> Timeline:
    """When each task begins.  Raises `ValueError` for names that come twice, are unknown or wait for each other."""
    found = sorted(tasks, key=lambda task: task.name)
    graph = {task.name: task for task in found}
    if len(graph) < len(found):
        raise ValueError("two tasks of one name")
    followers: dict[str, list[str]] = {name: [] for name in graph}
    for task in found:
        for name in sorted(set(task.after)):
            if name not in graph:
                raise ValueError(f"task {task.name} waits for {name}, which is none")
            followers[name].append(task.name)
    return _Run(graph, followers).timeline()


class _Run:
    """One pass over the graph: which tasks are ready, which resource is free."""

    def __init__(self, graph: Mapping[str, Task], followers: Mapping[str, Sequence[str]]) -> None:
        self._graph, self._followers = graph, followers
        self._missing = {name: len(set(task.after)) for name, task in graph.items()}
        self._rank = self._ranks()
        self._ready: dict[Resource, list[tuple[float, str]]] = {resource: [] for resource in Resource}
        self._running: dict[Resource, str] = {}
        self._ends: list[tuple[float, str]] = []
        self._starts: dict[str, float] = {}

    def _ranks(self) -> dict[str, float]:
        """Longest way from a task's beginning to the end, its successors first."""
        missing = dict(self._missing)
        order = [name for name, count in missing.items() if not count]
        for name in order:
            for follower in self._followers[name]:
                missing[follower] -= 1
                if not missing[follower]:
                    order.append(follower)
        if len(order) < len(missing):
            raise ValueError("tasks wait for each other")
        ranks: dict[str, float] = {}
        for name in reversed(order):
            ranks[name] = self._graph[name].seconds + max((ranks[one] for one in self._followers[name]), default=0.0)
        return ranks

    def timeline(self) -> Timeline:
        """Run everything."""
        for name, count in self._missing.items():
            if not count:
                self._release(name)
        now = 0.0
        self._start(now)
        while self._ends:
            now = self._ends[0][0]
            ended = []
            while self._ends and self._ends[0][0] == now:
                ended.append(heapq.heappop(self._ends)[1])
            for name in ended:
                self._end(name)
            self._start(now)
        busy = dict.fromkeys(Resource, 0.0)
        for task in self._graph.values():
            busy[task.resource] += task.seconds
        return Timeline(seconds=now, starts=self._starts, busy=busy)

    def _release(self, name: str) -> None:
        heapq.heappush(self._ready[self._graph[name].resource], (-self._rank[name], name))

    def _end(self, name: str) -> None:
        del self._running[self._graph[name].resource]
        for follower in self._followers[name]:
            self._missing[follower] -= 1
            if not self._missing[follower]:
                self._release(follower)

    def _start(self, now: float) -> None:
        for resource, ready in self._ready.items():
            if ready and resource not in self._running:
                name = heapq.heappop(ready)[1]
                self._running[resource] = name
                self._starts[name] = now
                heapq.heappush(self._ends, (now + self._graph[name].seconds, name))
