"""A process that computes its part of the last rows of another one, its leader.

Owns the process's life: its task comes through standard input, and the end of that input, which is the end of the
leader in whatever way, is its end too.  Does not know rows, or when its leader calls.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from batchgen_beam.engine.partition import follow
from batchgen_beam.errors import BatchgenError
from batchgen_beam.kernels.native_set import NativeKernels
from batchgen_beam.kernels.partitioned_set import PartitionedKernels
from batchgen_beam.kernels.process_group import MeetingPlace, ProcessGroup
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.interface import KernelSet
from batchgen_beam.settings import EngineSettings
from batchgen_beam.weights.loader import load_model

__all__ = ["FollowerTask", "inner_kernels", "main"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowerTask:
    """The part of one process: `rank` of those that meet at `place`.  `path`: the native kernels', None for torch."""

    model: Path
    settings: EngineSettings
    path: str | None
    place: MeetingPlace
    rank: int


def inner_kernels(settings: EngineSettings, path: str | None) -> KernelSet:
    """The kernel set of one process alone."""
    dtype = getattr(torch, settings.dtype)
    kept = dtype if settings.kv_dtype == "auto" else getattr(torch, settings.kv_dtype)
    if path is None:
        return TorchKernels(dtype, kv_dtype=kept)
    return NativeKernels(dtype, path, settings.threads, kv_dtype=kept)


def main() -> None:
    """Take the task, load this process's part of the model, and follow until the leader ends."""
    task: FollowerTask = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_leader, daemon=True).start()
    torch.set_num_threads(task.settings.threads)
    try:
        with ProcessGroup(task.place, task.rank) as group:
            kernels = PartitionedKernels(inner_kernels(task.settings, task.path), group)
            follow(load_model(task.model, kernels), kernels, task.settings, group)
    except BatchgenError as error:
        sys.exit(f"tail process {task.rank}: {error}")


def _end_with_leader() -> None:
    os.read(sys.stdin.fileno(), 1)  # nothing more is ever written: it returns when the leader's end is closed
    os._exit(1)
