"""An engine to be timed: a model on this machine, whose rows all run to their last token.

Owns the set-up that timings share.  Does not know what is timed, nor Beam.
"""

from __future__ import annotations

from pathlib import Path

import torch

from batchgen_beam.config.base import ModelConfig
from batchgen_beam.engine.engine import Engine
from batchgen_beam.engine.stats import EngineFacts
from batchgen_beam.kernels.choice import choose_kernels, settle_threads
from batchgen_beam.models.interface import KernelSet, Model
from batchgen_beam.settings import EngineSettings
from batchgen_beam.transforms.model_shapes import model_shapes

__all__ = ["formats_of", "timed_engine", "timed_kernels"]


def timed_kernels(config: ModelConfig, *, kernels: str, threads: int, cache: Path, dtype: str = "bfloat16",
                  kv_dtype: str = "auto") -> KernelSet:
    """The kernel set that a run of the model would take; fixes the threads of this process."""
    torch.set_num_threads(threads)
    return choose_kernels(getattr(torch, dtype), model_shapes(config), wanted=kernels, threads=threads,
                          cache=cache, kv_dtype=kv_dtype)


def formats_of(kernels: KernelSet) -> tuple[str, str]:
    """The settings `dtype` and `kv_dtype` of engines on a kernel set."""
    dtype, kept = (str(one).removeprefix("torch.") for one in (kernels.dtype, kernels.kv_dtype))
    return dtype, "auto" if kept == dtype else kept


def timed_engine(model: Model, kernels: KernelSet, settings: EngineSettings) -> Engine:
    """An engine in which no token ends a row before its `max_tokens`."""
    settle_threads(kernels)
    facts = EngineFacts(eos_ids=frozenset(), text_vocabulary=model.vocab_size, content_print="", numeric_print="")
    return Engine(model, kernels, settings, facts)
