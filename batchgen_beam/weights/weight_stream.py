"""Weights from disk into a ring of buffers, ahead of their use.

Owns the buffers, the one thread that fills them, and the order: layers ascending, from the last on to the first again.
A buffer is free, being filled or full, or leased to the caller; a lease that ends gives its buffer to the next layer
of the order.  The caller is one thread at a time; what the reader meets (a damaged area, a disk's fault) is raised in
it.  Does not know what weights are used for, or which of them are resident.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from batchgen_beam.errors import FatalError
from batchgen_beam.weights.direct_file import DirectFile
from batchgen_beam.weights.packed_copy import PackedCopy, PackedFile
from batchgen_beam.weights.packed_format import Area, DamagedCopy, pages

__all__ = ["LeasedAreas", "StreamStats", "WeightStream", "area_tensors", "page_memory"]

LOG = logging.getLogger(__name__)

_CLOSED = "the stream of weights was closed"
_HUGE = 2 << 20
_INDIRECT = "%d of %d files of packed weights are read through the page cache: their file system has no direct I/O"


def page_memory(size: int) -> mmap.mmap:
    """So many zero bytes that begin at a page, in huge pages where the system has any."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def area_tensors(memory: mmap.mmap, area: Area, begin: int = 0) -> dict[str, Tensor]:
    """Tensors over the memory of an area that lies `begin` bytes into it, by name."""
    return {name: torch.frombuffer(memory, dtype=tensor.torch_dtype, count=tensor.size // tensor.torch_dtype.itemsize,
                                   offset=begin + tensor.offset).view(tensor.shape)
            for name, tensor in area.tensors.items()}


class LeasedAreas:
    """Areas in a buffer, for the time of a lease: tensors over its memory, not copies of it."""

    def __init__(self, areas: Mapping[str, tuple[Area, int]], memory: mmap.mmap) -> None:
        self._areas = areas
        self._memory: mmap.mmap | None = memory

    def __contains__(self, area: str) -> bool:
        return area in self._areas

    def tensors(self, area: str) -> dict[str, Tensor]:
        """The area's tensors by name."""
        assert self._memory is not None, f"{area} was asked for after its lease"
        return area_tensors(self._memory, *self._areas[area])

    def end(self) -> None:
        """The buffer belongs to the ring again."""
        self._memory = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStats:
    """What a stream has done so far.  `waited_seconds`: the caller's; `direct_files` of `files` are read without the
    page cache; `restarts`: the caller asked for another layer than the next."""

    read_bytes: int
    waited_seconds: float
    read_seconds: float
    buffer_bytes: int
    checked_areas: int
    restarts: int
    files: int
    direct_files: int


@dataclass(slots=True, kw_only=True)
class _Fill:
    """A buffer and what is, or will be, in it."""

    layer: int
    areas: Mapping[str, tuple[Area, int]]
    memory: mmap.mmap
    abandoned: threading.Event
    done: Future[bool]


class WeightStream:
    """Reads `parts`, areas by layer, of a packed copy.

    `buffers` of `buffer_bytes` each are all its memory; with one, nothing is read ahead.  Each area's checksum is
    verified the first time it is read.  Reading begins at once.
    """

    def __init__(self, copy: PackedCopy, parts: Mapping[int, Sequence[str]], *, buffers: int, buffer_bytes: int,
                 open_file: Callable[[Path], DirectFile] = DirectFile,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        assert parts, "nothing to stream"
        assert buffers >= 1, buffers
        self._clock = clock
        self._order = sorted(parts)
        self._files: dict[int, PackedFile] = {layer: copy.layers[layer] for layer in self._order}
        self._areas = {layer: {area.name: area for area in file.header.areas} for layer, file in self._files.items()}
        self._parts = {layer: _placed([self._areas[layer][name] for name in parts[layer]]) for layer in self._order}
        self._buffer_bytes = pages(buffer_bytes)
        for layer, areas in self._parts.items():
            assert _end(areas) <= self._buffer_bytes, f"layer {layer} is larger than a buffer"
        self._all = [page_memory(self._buffer_bytes) for _ in range(buffers)]
        self._free = list(self._all)
        self._leased: list[mmap.mmap] = []
        self._ahead: deque[_Fill] = deque()
        self._checked: set[tuple[int, str]] = set()
        self._read_bytes, self._restarts, self._waited, self._read_seconds = 0, 0, 0.0, 0.0
        self._closed = False
        self._open: dict[int, DirectFile] = {}
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="weight-stream")
        try:
            for layer, file in self._files.items():
                self._open[layer] = open_file(file.path)
        except OSError:
            self.close()
            raise
        indirect = sum(not file.direct for file in self._open.values())
        if indirect:
            LOG.info(_INDIRECT, indirect, len(self._open))
        self._read_ahead(0)

    # The caller's side

    @contextmanager
    def layer(self, layer: int) -> Iterator[LeasedAreas]:
        """All streamed areas of a layer.  Another layer than the next of the order makes the reader begin there."""
        with self._lease(self._take(layer)) as areas:
            yield areas

    @contextmanager
    def areas(self, layer: int, names: Sequence[str]) -> Iterator[LeasedAreas]:
        """Only these of a layer's areas, such as the experts that some token goes to, read when they are asked for.

        Nothing is read ahead from then on, until a whole layer is asked for again.
        """
        self._drop_ahead()
        fill = self._submit(layer, _placed([self._areas[layer][name] for name in names]))
        self._wait(fill)
        with self._lease(fill) as areas:
            yield areas

    @contextmanager
    def _lease(self, fill: _Fill) -> Iterator[LeasedAreas]:
        self._leased.append(fill.memory)
        areas = LeasedAreas(fill.areas, fill.memory)
        try:
            yield areas
        finally:
            areas.end()
            self._leased.remove(fill.memory)
            self._free.append(fill.memory)
            if self._ahead and not self._closed:
                self._top_up()

    def _take(self, layer: int) -> _Fill:
        """The full buffer of the layer; afterwards the free ones are on their way."""
        if not self._ahead or self._ahead[0].layer != layer:
            self._restarts += bool(self._ahead)
            self._drop_ahead()
            self._read_ahead(self._order.index(layer))
        fill = self._ahead.popleft()
        if not self._ahead:
            self._read_ahead(self._order.index(layer) + 1)
        self._wait(fill)
        return fill

    def _wait(self, fill: _Fill) -> None:
        started = self._clock()
        try:
            if not fill.done.result():
                raise FatalError(_CLOSED)
        except CancelledError:
            raise FatalError(_CLOSED) from None
        except (OSError, DamagedCopy):
            self._drop_ahead()
            self._free.append(fill.memory)
            raise
        finally:
            self._waited += self._clock() - started

    def stats(self) -> StreamStats:
        """So far."""
        return StreamStats(
            read_bytes=self._read_bytes, waited_seconds=self._waited, read_seconds=self._read_seconds,
            buffer_bytes=len(self._all) * self._buffer_bytes, checked_areas=len(self._checked),
            restarts=self._restarts, files=len(self._files),
            direct_files=sum(file.direct for file in self._open.values()))

    def check_integrity(self) -> None:
        """Every buffer is in one place, and what is read ahead follows the order without a gap."""
        held = [*self._free, *self._leased, *(fill.memory for fill in self._ahead)]
        assert sorted(map(id, held)) == sorted(map(id, self._all)), "a buffer is lost, or in two places"
        places = [self._order.index(fill.layer) for fill in self._ahead]
        for place, following in pairwise(places):
            assert following == (place + 1) % len(self._order), f"read ahead out of order: {places}"

    def close(self) -> None:
        """Stop reading and give everything back; a caller that waits gets a `FatalError`.  Twice is no fault."""
        self._closed = True
        for fill in self._ahead:
            fill.abandoned.set()
        self._reader.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()
        self._free.clear()
        self._all.clear()
        for file in self._open.values():
            file.close()

    # The ring

    def _read_ahead(self, place: int) -> None:
        """Begin at a place of the order, as far as there are free buffers."""
        assert not self._ahead
        if self._free:
            self._submit_next(place)
            self._top_up()

    def _top_up(self) -> None:
        while self._free:
            self._submit_next(self._order.index(self._ahead[-1].layer) + 1)

    def _submit_next(self, place: int) -> None:
        layer = self._order[place % len(self._order)]
        self._ahead.append(self._submit(layer, self._parts[layer]))

    def _submit(self, layer: int, areas: Mapping[str, tuple[Area, int]]) -> _Fill:
        assert self._free, "every buffer is leased: end a lease first"
        assert _end(areas) <= self._buffer_bytes, f"{list(areas)} of layer {layer} are larger than a buffer"
        if self._closed:
            raise FatalError(_CLOSED)
        memory, abandoned = self._free.pop(), threading.Event()
        done = self._reader.submit(self._fill, layer, areas, memory, abandoned)
        return _Fill(layer=layer, areas=areas, memory=memory, abandoned=abandoned, done=done)

    def _drop_ahead(self) -> None:
        """Take back what was read ahead; the reader ends its block first."""
        for fill in self._ahead:
            fill.abandoned.set()
            fill.done.cancel()
        for fill in self._ahead:
            if not fill.done.cancelled():
                fill.done.exception()
            self._free.append(fill.memory)
        self._ahead.clear()

    # The reader's side

    def _fill(self, layer: int, areas: Mapping[str, tuple[Area, int]], memory: mmap.mmap,
              abandoned: threading.Event) -> bool:
        """Fill a buffer and verify what was never read before; False if it is no longer wanted."""
        started = self._clock()
        file, view = self._open[layer], memoryview(memory)
        was_direct = file.direct
        for offset, begin, size in _runs(areas):
            if not file.read(self._files[layer].begin + offset, view[begin:begin + size],
                             lambda: not (abandoned.is_set() or self._closed)):
                return False
            self._read_bytes += size
        if was_direct and not file.direct:
            LOG.info(_INDIRECT, 1, len(self._open))
        self._verify(layer, areas, view)
        self._read_seconds += self._clock() - started
        return True

    def _verify(self, layer: int, areas: Mapping[str, tuple[Area, int]], view: memoryview) -> None:
        for name, (area, begin) in areas.items():
            if (layer, name) in self._checked:
                continue
            self._files[layer].verify(area, view[begin:])
            self._checked.add((layer, name))


def _placed(areas: Sequence[Area]) -> dict[str, tuple[Area, int]]:
    """Areas in the order of the file, with their places in a buffer, one after the other."""
    placed, begin = {}, 0
    for area in sorted(areas, key=lambda area: area.offset):
        placed[area.name] = area, begin
        begin += pages(area.size)
    return placed


def _end(areas: Mapping[str, tuple[Area, int]]) -> int:
    return sum(pages(area.size) for area, _ in areas.values())


def _runs(areas: Mapping[str, tuple[Area, int]]) -> Iterator[tuple[int, int, int]]:
    """(offset in the file, offset in the buffer, bytes) of areas that follow each other in both."""
    runs: list[list[int]] = []
    for area, begin in areas.values():
        if runs and sum(runs[-1][::2]) == area.offset:
            runs[-1][2] += pages(area.size)
        else:
            runs.append([area.offset, begin, pages(area.size)])
    for offset, begin, size in runs:
        yield offset, begin, size
