"""A process that streams a model and tells how much memory that took: `python -m tests.weights.streaming_child FOLDER
CACHE KERNELS LIMIT` converts, loads and runs three passes of 64 tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from batchgen_beam.kernels.packing import packing_of
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.interface import KernelSet
from batchgen_beam.weights.tiered_loader import load_tiered
from tests.kernels.sets import HIGHEST, native
from tests.models.paged import PagedRun

__all__: list[str] = []


def memory(name: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def main(folder: Path, cache: Path, kernels: KernelSet, limit: int) -> None:
    """Print what was found as JSON."""
    x = torch.ones(64, 64, dtype=kernels.dtype)
    kernels.linear(x, kernels.pack([x]))  # what kernels keep once is no weight
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = memory("VmRSS")
    found = load_tiered(folder, kernels, packing_of(kernels), limit=limit, cache=cache)
    run = PagedRun(found.model, kernels, pages=4, page_tokens=64)
    for step in range(3):
        run.forward(("row", [(7 * step + i) % 256 for i in range(64)]))
    stats = found.streamed()
    assert stats is not None
    sys.stdout.write(json.dumps({
        "grown": memory("VmHWM") - before, "planned": found.residency.total_bytes, "ring": stats.buffer_bytes,
        "streamed": found.residency.streamed_bytes, "read": stats.read_bytes}) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]), TorchKernels(torch.bfloat16) if sys.argv[3] == "torch" else
         native(torch.bfloat16, HIGHEST[torch.bfloat16]), int(sys.argv[4]))
