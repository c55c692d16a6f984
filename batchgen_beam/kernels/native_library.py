"""The compiled kernels as Python sees them: the library, its structs, and which instruction paths this machine can run.

Owns the C interface: fields here are those of `native/decoder.h` and `native/sampling.h`, in the same order.  Does not
know kernel sets, models or batches.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int64, c_void_p
from functools import cache
from importlib.util import find_spec

__all__ = ["EMULATED_PATHS", "HALF_PATHS", "ON_REQUEST_PATHS", "PARTS", "PATHS", "Arithmetic", "Attention", "Batch",
           "Cache", "Decoder", "DecoderLayer", "Expert", "Experts", "Result", "Sampling", "Weight", "absence",
           "arithmetic", "library", "open_library"]

INTERFACE = 6

PATHS = ("avx2", "avx512", "avx512_bf16", "amx_bf16")
"""Instruction paths, each a step up from the one before."""

HALF_PATHS = ("avx512_bf16", "amx_bf16")
"""Paths that compute in bfloat16 only."""

ON_REQUEST_PATHS = ("amx_bf16",)
"""Paths that no machine has run yet: the environment has to ask for them."""

EMULATED_PATHS = ("amx_bf16_emulated",)
"""Slow stand-ins for units that a machine lacks, for tests: the same steps, rounded at other places."""

PARTS = ("norm", "qkv", "append", "attention", "out", "gate_up", "down", "head", "wait")
"""Where the time of a forward pass goes; `append` includes the rotation of queries and keys."""

Arithmetic = c_void_p
"""What one path computes for one type of value."""


class Weight(ctypes.Structure):
    """One `[outputs, inputs]` matrix in panels; `bias` float32 or null."""

    _fields_ = [("panels", c_void_p), ("bias", c_void_p), ("outputs", c_int64), ("inputs", c_int64)]


class Batch(ctypes.Structure):
    """A packed batch; every array is int64."""

    _fields_ = [("tokens", c_int64), ("rows", c_int64), ("wanted", c_int64), ("table_width", c_int64),
                ("token_ids", c_void_p), ("positions", c_void_p), ("offsets", c_void_p), ("wanted_at", c_void_p),
                ("page_table", c_void_p)]


class Cache(ctypes.Structure):
    """Keys and values of one layer."""

    _fields_ = [("keys", c_void_p), ("values", c_void_p)]


class Attention(ctypes.Structure):
    """Heads, their size, how far they see (a window of 0: all), whether their pages are of int8, and their sinks."""

    _fields_ = [("heads", c_int64), ("kv_heads", c_int64), ("size", c_int64), ("window", c_int64),
                ("int8_pages", c_int64), ("scale", c_float), ("sinks", c_void_p)]


class Expert(ctypes.Structure):
    """The weights of one expert."""

    _fields_ = [("gate", Weight), ("up", Weight), ("down", Weight)]


class Experts(ctypes.Structure):
    """Experts that are in memory together, and the tokens that go to them."""

    _fields_ = [("experts", POINTER(Expert)), ("ends", c_void_p), ("count", c_int64), ("tokens_at", c_void_p),
                ("weights", c_void_p), ("alpha", c_float), ("limit", c_float), ("shift", c_float)]


class DecoderLayer(ctypes.Structure):
    """The weights of one block."""

    _fields_ = [("attention_norm", c_void_p), ("qkv", Weight * 3), ("out", Weight), ("feed_forward_norm", c_void_p),
                ("gate", Weight), ("up", Weight), ("down", Weight)]


class Decoder(ctypes.Structure):
    """A whole decoder."""

    _fields_ = [("layers", POINTER(DecoderLayer)), ("layer_count", c_int64), ("hidden", c_int64), ("inner", c_int64),
                ("attention", Attention), ("epsilon", c_float), ("table", c_void_p),
                ("norm", c_void_p), ("head", Weight), ("cosines", c_void_p), ("sines", c_void_p)]


class Result(ctypes.Structure):
    """Where the wanted tokens' logits, or their greatest, go."""

    _fields_ = [("eligible", c_int64), ("logits_at", c_void_p), ("logits", c_void_p), ("ids", c_void_p),
                ("logprobs", c_void_p)]


class Sampling(ctypes.Structure):
    """Rows of logits, the parameters of each, and where its results go."""

    _fields_ = [("rows", c_int64), ("vocabulary", c_int64), ("text", c_int64), ("width", c_int64),
                ("logits", c_void_p), ("greedy", c_void_p), ("temperature", c_void_p), ("top_k", c_void_p),
                ("top_p", c_void_p), ("uniform", c_void_p), ("listed", c_void_p), ("ids", c_void_p),
                ("logprobs", c_void_p), ("top_ids", c_void_p), ("top_logprobs", c_void_p), ("bad", c_void_p)]


_SIGNATURES: dict[str, tuple[type[object] | None, list[type[object]]]] = {
    "bg_interface": (c_int, []),
    "bg_arithmetic": (c_void_p, [c_char_p, c_int]),
    "bg_packed_bytes": (c_int64, [c_void_p, c_int64, c_int64]),
    "bg_pack": (None, [c_void_p, c_void_p, c_int64, c_int64, c_void_p]),
    "bg_linear": (c_int, [c_void_p, c_int, c_void_p, c_int64, POINTER(Weight), c_int, c_void_p]),
    "bg_norm": (c_int, [c_void_p, c_int, c_void_p, c_void_p, c_int64, c_int64, c_float, c_void_p]),
    "bg_swiglu": (c_int, [c_void_p, c_int, c_void_p, c_int64, c_int64, c_void_p]),
    "bg_rope": (c_int, [c_void_p, c_int, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]),
    "bg_append_keys": (c_int, [c_void_p, c_int, c_void_p, c_int64, POINTER(Batch), POINTER(Attention), c_void_p]),
    "bg_append_values": (c_int, [c_void_p, c_int, c_void_p, c_int64, POINTER(Batch), POINTER(Attention), c_void_p]),
    "bg_attention": (c_int, [c_void_p, c_int, c_void_p, c_int64, POINTER(Batch), POINTER(Attention), POINTER(Cache),
                            c_void_p]),
    "bg_head": (c_int, [c_void_p, c_int, c_void_p, c_int64, POINTER(Weight), POINTER(Result)]),
    "bg_sample": (c_int, [c_void_p, c_int, POINTER(Sampling)]),
    "bg_run_experts": (c_int, [c_void_p, c_int, c_void_p, POINTER(Experts), c_void_p]),
    "bg_forward": (c_int, [c_void_p, c_int, POINTER(Decoder), POINTER(Batch), POINTER(Cache), POINTER(Result),
                           POINTER(c_double)]),
}


_FALLIBLE = ("bg_linear", "bg_norm", "bg_swiglu", "bg_rope", "bg_append_keys", "bg_append_values", "bg_attention",
             "bg_head", "bg_sample", "bg_run_experts", "bg_forward")
"""Functions that return whether they did their work."""

_DONE, _NO_MEMORY, _NO_THREAD = 0, 1, 2

_MACHINES = ("x86_64", "AMD64")
"""What the processors are called that the library is built for."""

_BUILD = "reinstall the package, or in a checkout run `python setup.py build_ext --inplace`, where a C++ compiler is"


def _raise_fault(status: int, function: object, arguments: tuple[object, ...]) -> None:
    """What a call that could not do its work is in Python."""
    del arguments
    if status == _NO_MEMORY:
        raise MemoryError("the native kernels got no memory")
    if status == _NO_THREAD:
        raise RuntimeError("the native kernels could not start their threads; lower the number of threads")
    if status != _DONE:
        name = getattr(function, "__name__", function)
        raise RuntimeError(f"the native kernels ended {name} with status {status}, which this release does not know")


def open_library(place: str | None, system: str, machine: str) -> ctypes.CDLL | str:
    """The library at `place` (None: there is none), or why it can't be used and what to do about that.

    `system` and `machine` are the names of `sys.platform` and `platform.machine`.
    """
    if place is None:
        if system != "linux" or machine not in _MACHINES:
            return (f"the native kernels need Linux on x86-64, this is {system} on {machine}: torch is what there is "
                    f"here, --kernels=torch asks for it by name")
        return f"the native library was not built for this installation: {_BUILD}"
    try:
        found = ctypes.CDLL(place)
        interface = found.bg_interface()
        if interface != INTERFACE:
            return f"{place} has interface {interface}, this release needs {INTERFACE}: {_BUILD}"
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(found, name)
            function.restype, function.argtypes = result, arguments
            if name in _FALLIBLE:
                function.errcheck = _raise_fault
    except (OSError, AttributeError) as error:
        return f"{place} can't be loaded ({error}): {_BUILD}"
    return found


@cache
def _opened() -> ctypes.CDLL | str:
    spec = find_spec("batchgen_beam.kernels._native")
    return open_library(None if spec is None else spec.origin, sys.platform, platform.machine())


def library() -> ctypes.CDLL | None:
    """The library of this installation; None where it has none that can be used."""
    found = _opened()
    return None if isinstance(found, str) else found


def absence() -> str | None:
    """Why this installation has no library that can be used, and what to do about that; None where it has one."""
    found = _opened()
    return found if isinstance(found, str) else None


def arithmetic(path: str, *, half: bool) -> int | None:
    """The arithmetic of a path for bfloat16 (`half`) or float32; None where this machine can't run it.

    For tiles (`amx`) this asks the operating system, whose permission changes the process for good.
    """
    found = library()
    address: int | None = None if found is None else found.bg_arithmetic(path.encode(), int(half))
    return address
