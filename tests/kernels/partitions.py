"""A partition inside one process: a thread for each of its processes, connected as processes are."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from batchgen_beam.kernels.process_group import MeetingPlace, ProcessGroup

T = TypeVar("T")


def in_partition(folder: Path, size: int, work: Callable[[ProcessGroup], T]) -> list[T]:
    """What `work` returns in each of `size` places, which meet in a new `folder`."""
    folder.mkdir()
    place = MeetingPlace(folder=folder, size=size, join=60, answer=60)

    def run(rank: int) -> T:
        with ProcessGroup(place, rank) as group:
            return work(group)

    with ThreadPoolExecutor(size) as threads:
        return [future.result() for future in [threads.submit(run, rank) for rank in range(size)]]
