"""Which kernel set and instruction path an engine on this machine uses.

Owns the preference: native before torch, and of two paths the one that a short timing finds faster, asked once per
processor and library and then remembered beside the model cache.  A path's bits differ from another's: where the choice
can't be kept, a run that is begun again may meet another path, and begins its unfinished rows again.  Does not know
models, only their shapes.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from batchgen_beam.errors import OptionError
from batchgen_beam.kernels.native_library import HALF_PATHS, ON_REQUEST_PATHS, PATHS, absence, arithmetic
from batchgen_beam.kernels.native_set import HEAD_MULTIPLE, KERNELS_VERSION, NativeKernels
from batchgen_beam.kernels.remembered import remembered
from batchgen_beam.kernels.self_test import ModelShapes
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.interface import KernelSet

__all__ = ["ISA", "TIMED", "choose_kernels", "machine_digest", "refuse_kv_dtype", "settle_threads"]

LOG = logging.getLogger(__name__)

ISA = "BATCHGEN_ISA"
"""The environment's word for the path to use: one of `PATHS`."""

TIMED = ("avx512", "avx512_bf16")
"""Paths of which neither is always the faster one: the pair instruction is fast on some processors only."""

_ROUNDS = 7


def refuse_kv_dtype(kv_dtype: str, shapes: ModelShapes) -> None:
    """`OptionError` for another than `auto` where the model keeps no keys and values."""
    if kv_dtype != "auto" and not shapes.attention:
        raise OptionError(f"--kv-dtype={kv_dtype}: the model keeps no keys and values; use --kv-dtype=auto")


def settle_threads(kernels: KernelSet) -> None:
    """Leave torch one thread where the kernel set has its own: what torch still computes is little, and its threads
    spin for a while after each operation on the cores that those of the set need.  Once the weights are loaded."""
    if kernels.name == NativeKernels.name:
        torch.set_num_threads(1)


def choose_kernels(dtype: torch.dtype, shapes: ModelShapes, *, wanted: str, threads: int, cache: Path,
                   kv_dtype: str = "auto", environment: Mapping[str, str] = os.environ) -> KernelSet:
    """The kernel set for a model of these shapes.

    `kv_dtype` is one of `KV_DTYPES`, see `refuse_kv_dtype`.  `wanted` is `torch`, `native` (an `OptionError` says why
    it can't be) or `auto`, which takes torch where native can't be, and warns where the reason is the installation.
    `cache` is the folder in which the timing is remembered.
    """
    refuse_kv_dtype(kv_dtype, shapes)
    kept = dtype if kv_dtype == "auto" else getattr(torch, kv_dtype)
    asked = _asked(environment)
    reason = "--kernels=torch asks for them" if wanted == "torch" else _hindrance(dtype, shapes)
    if reason is None:
        return NativeKernels(dtype, _forced(dtype, asked) or _path(dtype, cache), threads, kv_dtype=kept)
    if wanted == "native":
        raise OptionError(f"--kernels=native: {reason}; use --kernels=auto")
    unexpected = asked is not None or (wanted == "auto" and absence() is not None)
    LOG.log(logging.WARNING if unexpected else logging.INFO, "torch kernels: %s%s", reason,
            "" if asked is None else f"; {ISA}={asked} has no effect on them")
    return TorchKernels(dtype, kv_dtype=kept)


def _hindrance(dtype: torch.dtype, shapes: ModelShapes) -> str | None:
    """Why the native set can't run the model here."""
    missing = absence()
    if missing is not None:
        return missing
    if not _paths(dtype):
        return "this processor has none of the instruction paths " + ", ".join(PATHS)
    if not shapes.attention:
        return "the model has no attention of the kind that the native set computes"
    if any(shape.value_size is not None for shape in shapes.attention):
        return "the model has latent attention, which the native set does not compute"
    odd = next((shape.size for shape in shapes.attention if shape.size % HEAD_MULTIPLE), None)
    if odd is not None:
        return f"the model's heads of {odd} values are no multiple of {HEAD_MULTIPLE}"
    inputs = [count for _, count in (*shapes.linear, shapes.head)]
    if shapes.experts is not None:
        inputs += [shapes.experts.size, shapes.experts.inner]
    if dtype is torch.bfloat16 and any(count % 2 for count in inputs):
        return "a weight of the model has an odd number of inputs"
    return None


def _paths(dtype: torch.dtype, asked: str = "") -> list[str]:
    """What this machine can run, the highest last; of the paths on request only the one that is `asked` for."""
    return [path for path in PATHS if (path == asked or path not in ON_REQUEST_PATHS)
            and arithmetic(path, half=dtype is torch.bfloat16) is not None]


def _asked(environment: Mapping[str, str]) -> str | None:
    """The path that the environment names."""
    path = environment.get(ISA)
    if path and path not in PATHS:
        raise OptionError(f"{ISA}={path} is no instruction path; give one of {', '.join(PATHS)}, or leave it out")
    return path or None


def _forced(dtype: torch.dtype, asked: str | None) -> str | None:
    """The path that is asked for, where it computes in `dtype`; else a run takes its own highest path."""
    if asked is None or (dtype is torch.float32 and asked in HALF_PATHS):
        return None
    found = _paths(dtype, asked)
    if asked not in found:
        raise OptionError(f"{ISA}={asked} is no instruction path of this machine; for {dtype} it has "
                          f"{', '.join(found)}")
    return asked


def _path(dtype: torch.dtype, cache: Path) -> str:
    """The highest path, or what the timing said of the two that have to be timed."""
    found = _paths(dtype)
    if not set(TIMED) <= set(found):
        return found[-1]
    return remembered(cache / f"kernel-path-{machine_digest()}.json", lambda: _faster(dtype),
                      to_json=lambda path: {"path": path}, from_json=_timed)


def _timed(kept: Any) -> str:
    """The choice that a file holds."""
    return TIMED[TIMED.index(kept["path"])]


def machine_digest() -> str:
    """The processor and the library, as a short digest."""
    name = torch.cpu.get_capabilities().get("cpu_name", "")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    kind = sorted({line for line in lines if line.startswith(("vendor_id", "cpu family", "model", "stepping"))})
    return hashlib.sha256(repr((name, kind, KERNELS_VERSION)).encode()).hexdigest()[:16]


def _faster(dtype: torch.dtype) -> str:
    """By the least time of a product that fits into a core's cache, the two taking turns."""
    x_TK, weight_NK = torch.ones(96, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    kernels = {path: NativeKernels(dtype, path, 1) for path in TIMED}
    packed = {path: kernels[path].pack([weight_NK]) for path in TIMED}
    seconds = dict.fromkeys(TIMED, float("inf"))
    for _ in range(_ROUNDS):
        for path in TIMED:
            started = time.perf_counter()
            kernels[path].linear(x_TK, packed[path])
            seconds[path] = min(seconds[path], time.perf_counter() - started)
    LOG.info("instruction paths timed: %s", ", ".join(f"{path} {1e6 * seconds[path]:.0f} us" for path in TIMED))
    return min(TIMED, key=seconds.__getitem__)
