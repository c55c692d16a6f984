"""The other processes of a partition, and what they are started with.  In a file of its own: they import it by name."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from torch import Tensor

from batchgen_beam.engine.partition import follow
from batchgen_beam.errors import EngineError
from batchgen_beam.kernels.native_set import NativeKernels
from batchgen_beam.kernels.partitioned_set import PartitionedKernels
from batchgen_beam.kernels.process_group import Gathering, MeetingPlace, ProcessGroup
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.interface import CacheSpec, KernelSet
from batchgen_beam.settings import EngineSettings
from batchgen_beam.weights.loader import load_model

WAIT = 60.0
"""Seconds that a test waits for a process, at most."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A checkpoint, the kernel set's path (None: torch) and the settings."""

    folder: Path
    settings: EngineSettings
    path: str | None = None
    threads: int = 1

    def kernels(self) -> KernelSet:
        """The set of one process."""
        dtype = getattr(torch, self.settings.dtype)
        return TorchKernels(dtype) if self.path is None else NativeKernels(dtype, self.path, self.threads)


class DirtyKernels(PartitionedKernels):
    """A partitioned set whose fresh pages hold no numbers, so that those that were cleared can be told."""

    def __init__(self, inner: KernelSet, group: Gathering) -> None:
        super().__init__(inner, group)
        self.caches: list[Tensor] = []

    def dirty_pages(self) -> list[Tensor]:
        """For each cache, whether a page still holds something that is no number."""
        return [cache.isnan().flatten(1).any(1) for cache in self.caches]

    def allocate(self, spec: CacheSpec, count: int, page_tokens: int) -> Tensor:
        """Page 0 stays zero."""
        cache = super().allocate(spec, count, page_tokens)
        cache[1:] = float("nan")
        self.caches.append(cache)
        return cache


def run_follower(case: Case, place: MeetingPlace, rank: int) -> None:
    """Follow to the end; an error of the engine is written beside the meeting place, and the process ends with 3."""
    torch.set_num_threads(case.threads)
    try:
        with ProcessGroup(place, rank) as group:
            kernels = DirtyKernels(case.kernels(), group)
            follow(load_model(case.folder, kernels), kernels, case.settings, group)
    except EngineError as error:
        (place.folder / f"error-{rank}").write_text(str(error))
        raise SystemExit(3) from None


@contextmanager
def followers(case: Case, place: MeetingPlace) -> Iterator[list[BaseProcess]]:
    """The processes but the first, started; none is left behind."""
    place.folder.mkdir()
    context = multiprocessing.get_context("spawn")
    found = [context.Process(target=run_follower, args=(case, place, rank)) for rank in range(1, place.size)]
    try:
        for process in found:
            process.start()
        yield found
        for process in found:
            process.join(WAIT)
    finally:
        for process in found:
            process.kill()
            process.join()
