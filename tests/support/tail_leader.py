"""A program that leads a process, says which, and waits.  In a file of its own, which imports little."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.settings import EngineSettings
from batchgen_beam.transforms.tail_processes import TailProcesses

if __name__ == "__main__":
    settings = EngineSettings(dtype="float32", kernels="torch", threads=1, kv_memory=1 << 22, tail_processes=2)
    tail = TailProcesses(Path(sys.argv[1]), TorchKernels(torch.float32), settings)
    sys.stdout.write(f"{tail.processes[0].pid}\n")
    sys.stdout.flush()
    sys.stdin.read()
