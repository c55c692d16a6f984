"""A process that streams a model and tells how much memory that took: `python -m tests.weights.streaming_child FOLDER
CACHE KERNELS LIMIT` converts, then tests its kernels, loads and answers a row, as any worker of a run does."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch

from batchgen_beam.kernels.choice import choose_kernels
from batchgen_beam.kernels.packing import packing_of
from batchgen_beam.kernels.self_test import AttentionShape, ModelShapes, check_invariance
from batchgen_beam.records import Prompt, RowKey, SamplingParams, token_array
from batchgen_beam.settings import BATCHES, EngineSettings
from batchgen_beam.transforms.engine_loader import load_engine
from batchgen_beam.transforms.model_folder import ModelSource
from batchgen_beam.weights.checkpoint import check_checkpoint
from batchgen_beam.weights.packed_copy import make_copy
from batchgen_beam.weights.tiered_loader import plan_copy

__all__: list[str] = []

FEW = ModelShapes(linear=((64, 64),), head=(64, 64), norms=(64,), activations=(64,),
                  attention=(AttentionShape(heads=1, kv_heads=1, size=64),))
PROMPT = Prompt(key=RowKey("row", "0" * 64), token_ids=token_array(3 * i + 1 for i in range(64)),
                params=SamplingParams(temperature=0.0, max_tokens=3))


def memory(name: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def main(source: ModelSource, settings: EngineSettings) -> None:
    """Print what was found as JSON."""
    model = source.open(max_context=None)
    kernels = choose_kernels(torch.bfloat16, FEW, wanted=settings.kernels, threads=1, cache=Path(source.model_cache))
    check_invariance(kernels, FEW)  # what kernels keep once is no weight
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = memory("VmRSS")
    plan, _ = plan_copy(check_checkpoint(model.path), kernels, packing_of(kernels))
    make_copy(plan, Path(source.model_cache))
    converting = memory("VmHWM") - before
    Path("/proc/self/clear_refs").write_text("5")
    loaded = load_engine(model, settings, "content", Path(source.model_cache))
    loaded.driver.open_lane("lane")
    loaded.driver.submit("lane", [PROMPT])
    loaded.driver.fed("lane")
    answers = loaded.driver.take("lane", timeout=120)
    stats = loaded.streamed()
    assert stats is not None
    sys.stdout.write(json.dumps({
        "converting": converting, "grown": memory("VmHWM") - before, "answers": len(answers),
        "steps": loaded.driver.stats().forward_calls, "ring": stats.buffer_bytes, "streamed": stats.unit_bytes,
        "read": stats.read_bytes}) + "\n")
    loaded.driver.close()


if __name__ == "__main__":
    main(ModelSource(model=sys.argv[1], model_cache=sys.argv[2], clock=datetime(2026, 1, 1, tzinfo=UTC)),
         EngineSettings(kernels=sys.argv[3], threads=1, weight_memory=int(sys.argv[4]), kv_memory=1 << 22,
                        left_open=BATCHES))
