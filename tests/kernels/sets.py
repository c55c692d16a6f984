"""Every kernel set and instruction path that this machine can run, as parameters of tests."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from batchgen_beam.kernels.native_library import EMULATED_PATHS, ON_REQUEST_PATHS, PATHS, arithmetic
from batchgen_beam.kernels.native_set import NativeKernels
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.interface import KernelSet

__all__ = ["BFLOAT16_SETS", "DTYPES", "EMULATED", "EVERY_SET", "FLOAT32_SETS", "HIGHEST", "INT8_SETS", "NATIVE",
           "NEEDS_NATIVE", "NOT_SANITIZED", "SAMPLERS", "MakeKernels", "native"]

DTYPES = (torch.float32, torch.bfloat16)

MakeKernels = Callable[[], KernelSet]


def native(dtype: torch.dtype, path: str, threads: int = 1, *, kv_dtype: torch.dtype | None = None) -> NativeKernels:
    """The native set on one path."""
    return NativeKernels(dtype, path, threads, kv_dtype=kv_dtype)


NATIVE = [(dtype, path) for dtype in DTYPES for path in PATHS
          if arithmetic(path, half=dtype is torch.bfloat16) is not None]

HIGHEST = {dtype: path for dtype, path in NATIVE if path not in ON_REQUEST_PATHS}
"""Of the paths that are taken unasked, the highest for each dtype."""

EMULATED = [(torch.bfloat16, path) for path in EMULATED_PATHS if arithmetic(path, half=True) is not None]
"""What is built on units that this machine may lack: too slow for whole models."""

NEEDS_NATIVE = pytest.mark.skipif(not NATIVE, reason="no native library, or none of its paths, on this machine")

NOT_SANITIZED = pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""),
                                   reason="the sanitizer ends the process where memory or a thread is missing")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_ALL = [(dtype, f"torch-{_name(dtype)}", lambda dtype=dtype: TorchKernels(dtype)) for dtype in DTYPES]
_ALL += [(dtype, f"{path}-{_name(dtype)}", lambda dtype=dtype, path=path: native(dtype, path))
         for dtype, path in NATIVE]

_INT8 = [(f"torch-{_name(dtype)}-int8", lambda dtype=dtype: TorchKernels(dtype, kv_dtype=torch.int8))
         for dtype in DTYPES]
_INT8 += [(f"{path}-{_name(dtype)}-int8", lambda dtype=dtype, path=path: native(dtype, path, kv_dtype=torch.int8))
          for dtype, path in NATIVE]

INT8_SETS = [pytest.param(make, id=name) for name, make in _INT8]
"""The same sets with keys and values kept as int8."""

EVERY_SET = [pytest.param(make, id=name) for _, name, make in _ALL] + INT8_SETS
FLOAT32_SETS = [pytest.param(make, id=name) for dtype, name, make in _ALL if dtype is torch.float32]
BFLOAT16_SETS = [pytest.param(make, id=name) for dtype, name, make in _ALL if dtype is torch.bfloat16]

SAMPLERS = [pytest.param(lambda: TorchKernels(torch.float32), id="torch")]
SAMPLERS += [pytest.param(lambda path=path: native(torch.bfloat16, path), id=path) for dtype, path in NATIVE
             if dtype is torch.bfloat16]
"""Logits are float32 whatever the dtype: one of each arithmetic."""
