"""Weights from disk into a ring of buffers, ahead of their use.

Owns the buffers, the one thread that fills them, and what is read next: units in the order of a forward pass, from the
last on to the first again.  What every token needs is read ahead; of the units that only some tokens need, those that
`expect` names, and unasked only while the layers before needed all of theirs.  A buffer is free, on its way or full, or
held by the caller, who holds one at a time.  The caller is one thread at a time; what the reader meets (a damaged area,
a disk's fault) is raised in it.  Does not know what weights are used for, or which of them are resident.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor

from batchgen_beam.errors import FatalError
from batchgen_beam.weights.direct_file import DirectFile
from batchgen_beam.weights.packed_copy import PackedCopy
from batchgen_beam.weights.packed_format import Area, pages
from batchgen_beam.weights.page_memory import page_memory
from batchgen_beam.weights.residency import Unit

__all__ = ["StreamStats", "WeightStream", "area_tensors"]

LOG = logging.getLogger(__name__)


def area_tensors(memory: mmap.mmap, area: Area) -> dict[str, Tensor]:
    """Tensors over the memory that an area begins, by name."""
    return {name: torch.frombuffer(memory, dtype=tensor.torch_dtype, count=tensor.size // tensor.torch_dtype.itemsize,
                                   offset=tensor.offset).view(tensor.shape)
            for name, tensor in area.tensors.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStats:
    """What a stream has done so far.  It streams `unit_bytes` in all; `unused_bytes` were read ahead in vain;
    `waited_seconds` are the caller's; `direct_files` of `files` are read without the page cache."""

    unit_bytes: int

    read_bytes: int
    read_units: int
    unused_bytes: int
    waited_seconds: float
    read_seconds: float
    buffer_bytes: int
    files: int
    direct_files: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Fill:
    """A buffer and what is, or will be, in it."""

    unit: Unit
    memory: mmap.mmap
    abandoned: threading.Event
    done: Future[bool]


class WeightStream:
    """Reads `order`, areas of a packed copy in the order of use.

    `buffers`, two or more, of `buffer_bytes` each are all its memory.  Each area's checksum is verified the first time
    it is read.  Reading begins at once.
    """

    def __init__(self, copy: PackedCopy, order: Sequence[Unit], *, buffers: int, buffer_bytes: int,
                 open_file: Callable[[Path], DirectFile] = DirectFile,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        assert order, "nothing to stream"
        assert buffers >= 2, buffers
        assert all(unit.size <= buffer_bytes for unit in order), "a unit is larger than a buffer"
        self._clock = clock
        self._order = list(order)
        self._place = {unit.name: place for place, unit in enumerate(order)}
        self._some: dict[int, set[str]] = {unit.layer: set() for unit in order}
        for unit in order:
            if unit.rank is not None:
                self._some[unit.layer].add(unit.name)
        self._files = {layer: copy.layers[layer] for layer in sorted({unit.layer for unit in order})}
        self._areas = {area.name: area for file in self._files.values() for area in file.header.areas}
        self._buffer_bytes = pages(buffer_bytes)
        self._free = [page_memory(self._buffer_bytes) for _ in range(buffers)]
        self._buffers = buffers
        self._held: _Fill | None = None
        self._ahead: deque[_Fill] = deque()
        self._planned: deque[Unit] = deque()
        self._next, self._all_needed = 0, False
        self._checked: set[str] = set()
        self._read_bytes, self._read_units, self._unused_bytes = 0, 0, 0
        self._waited, self._read_seconds = 0.0, 0.0
        self._said_indirect = self._closed = False
        self._open: dict[int, DirectFile] = {}
        self._reading: threading.Thread | None = None
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="weight-stream")
        try:
            for layer, file in self._files.items():
                self._open[layer] = open_file(file.path)
        except FatalError:
            self.close()
            raise
        self._read_ahead()

    # The caller's side

    def use(self, name: str) -> dict[str, Tensor]:
        """The unit's tensors over a buffer's memory, valid until another unit is used."""
        if self._held is None or self._held.unit.name != name:
            self._release()
            self._held = self._take(name)
        return area_tensors(self._held.memory, self._areas[name])

    def expect(self, layer: int, names: Sequence[str]) -> None:
        """Of the layer's units that only some tokens need, these are used next, in this order, and no other is."""
        some = self._some[layer]
        self._all_needed = len(names) == len(some)
        wanted = deque(self._order[self._place[name]] for name in names)
        if self._held is not None and wanted and wanted[0].name == self._held.unit.name:
            wanted.popleft()
        dropped, passed = [], False
        for fill in self._ahead:
            mine = not passed and fill.unit.name in some
            if mine and wanted and fill.unit.name == wanted[0].name:
                wanted.popleft()
            elif mine or wanted:
                dropped.append(fill)
            else:
                passed = True
        self._drop(dropped)
        if not passed:
            self._planned = wanted
            self._next = max(self._place[name] for name in some) + 1
        self._read_ahead()

    def stats(self) -> StreamStats:
        """So far."""
        return StreamStats(
            unit_bytes=sum(unit.size for unit in self._order), read_bytes=self._read_bytes,
            read_units=self._read_units, unused_bytes=self._unused_bytes, waited_seconds=self._waited,
            read_seconds=self._read_seconds, buffer_bytes=self._buffers * self._buffer_bytes,
            files=len(self._files), direct_files=sum(file.direct for file in self._open.values()))

    def check_integrity(self) -> None:
        """Every buffer is in one place, and none is lost."""
        held = [] if self._held is None else [self._held]
        memories = [*self._free, *(fill.memory for fill in (*held, *self._ahead))]
        assert len({id(memory) for memory in memories}) == len(memories) == self._buffers, "a buffer is lost or shared"

    def close(self) -> None:
        """Stop reading and give everything back.  Twice is no fault, nor is the reader as the caller, whom the
        collection of garbage may choose: it ends after what it is at."""
        for fill in self._ahead:
            fill.abandoned.set()
        self._reader.shutdown(wait=threading.current_thread() is not self._reading, cancel_futures=True)
        if self._open and not self._closed:
            LOG.info("streamed weights: %s", self.stats())
        self._closed = True
        self._held = None
        self._ahead.clear()
        self._free.clear()
        for file in self._open.values():
            file.close()

    # The ring

    def _take(self, name: str) -> _Fill:
        """The full buffer of the unit; what was read ahead of it is passed over."""
        self._drop(list(takewhile(lambda fill: fill.unit.name != name, self._ahead)))
        if not self._ahead:
            self._planned = deque([self._order[self._place[name]]])
            self._next = self._place[name] + 1
        self._read_ahead()
        fill = self._ahead.popleft()
        self._wait(fill)
        return fill

    def _wait(self, fill: _Fill) -> None:
        """Until it is full; what the reader met meanwhile is raised, and nothing is ahead any more."""
        started, filled = self._clock(), False
        try:
            filled = fill.done.result()
        finally:
            self._waited += self._clock() - started
            if not filled:
                self._drop(list(self._ahead))
                self._free.append(fill.memory)
        assert filled, f"{fill.unit.name} was given up while it was waited for"

    def _release(self) -> None:
        """Give the held buffer to what comes next."""
        if self._held is not None:
            self._free.append(self._held.memory)
            self._held = None
            self._read_ahead()

    def _read_ahead(self) -> None:
        """As far as there are free buffers, and it is known what comes next."""
        while self._free:
            unit = self._following()
            if unit is None:
                return
            memory, abandoned = self._free.pop(), threading.Event()
            done = self._reader.submit(self._fill, unit, memory, abandoned)
            self._ahead.append(_Fill(unit=unit, memory=memory, abandoned=abandoned, done=done))

    def _following(self) -> Unit | None:
        """The next unit to read; None where the choice of tokens has to be waited for."""
        if self._planned:
            return self._planned.popleft()
        unit = self._order[self._next % len(self._order)]
        if unit.rank is not None and not self._all_needed:
            return None
        self._next = self._next % len(self._order) + 1
        return unit

    def _drop(self, fills: Sequence[_Fill]) -> None:
        """Take buffers back that were read ahead; the reader ends its block first."""
        for fill in fills:
            fill.abandoned.set()
            fill.done.cancel()
        for fill in fills:
            self._ahead.remove(fill)
            if not fill.done.cancelled() and fill.done.exception() is None and fill.done.result():
                self._unused_bytes += fill.unit.size
            self._free.append(fill.memory)

    # The reader's side

    def _fill(self, unit: Unit, memory: mmap.mmap, abandoned: threading.Event) -> bool:
        """Fill a buffer and verify what was never read before; False if it is no longer wanted."""
        self._reading = threading.current_thread()
        started = self._clock()
        file, area, view = self._files[unit.layer], self._areas[unit.name], memoryview(memory)
        size = pages(area.size)
        if not self._open[unit.layer].read(file.begin + area.offset, view[:size], lambda: not abandoned.is_set()):
            return False
        self._say_if_indirect(self._open[unit.layer])
        if unit.name not in self._checked:
            file.verify(area, view)
            self._checked.add(unit.name)
        self._read_bytes += size
        self._read_units += 1
        self._read_seconds += self._clock() - started
        return True

    def _say_if_indirect(self, file: DirectFile) -> None:
        if not file.direct and not self._said_indirect:
            self._said_indirect = True
            LOG.warning("%s and its like are read through the page cache, which --weight-memory does not count: their "
                        "file system has no direct I/O", file.path)
