"""The rope keys of a config.json, out of what a GGUF file keeps: scaling keys, or a tensor of frequency factors.

Owns the way back from `rope_freqs.weight` (frequencies are divided by it) to the four numbers of `llama3` rope.
Does not know files or tensors' names.  Formulas: llama.cpp `ggml_rope_yarn_corr_dims` and `rope_yarn`; Llama 3.1
reference code.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchgen_beam.errors import CheckpointError
from batchgen_beam.weights.gguf_metadata import GgufHyperparameters

__all__ = ["rope_scaling_json"]

TOLERANCE = 1e-4
"""Largest relative error of a rebuilt factor: float32 factors fit to 1e-6, another formula misses by far more."""


def rope_scaling_json(hyper: GgufHyperparameters, factors_f: NDArray[np.float32] | None,
                      path: Path) -> dict[str, Any] | None:
    """The value of `rope_scaling`, None for plain rope; `path` is the file that errors name.

    Raises:
        CheckpointError: a kind without counterpart, or factors that `llama3` rope can't have made.
    """
    kind = None if hyper.rope_scaling is None else hyper.rope_scaling["type"]
    if factors_f is not None and kind is not None:
        raise CheckpointError(f"{path}: rope scaling {kind!r} together with rope_freqs.weight is not supported")
    if factors_f is not None:
        return _llama3(hyper, factors_f.astype(np.float64), path)
    if kind is None:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": _number(hyper, path, "factor")}
    if kind == "yarn":
        return _yarn(hyper, path)
    raise CheckpointError(f"{path}: GGUF rope scaling {kind!r} is not supported; supported are none, linear and yarn")


def _number(hyper: GgufHyperparameters, path: Path, key: str, default: float | None = None) -> float:
    value = (hyper.rope_scaling or {}).get(key, default)
    if value is None:
        raise CheckpointError(f"{path}: rope scaling needs the metadata key rope.scaling.{key}")
    return float(value)


def _yarn(hyper: GgufHyperparameters, path: Path) -> dict[str, Any]:
    factor = _number(hyper, path, "factor")
    found = {"rope_type": "yarn", "factor": factor,
             "original_max_position_embeddings": int(_number(hyper, path, "original_context_length")),
             "beta_fast": _number(hyper, path, "yarn_beta_fast", 32.0),
             "beta_slow": _number(hyper, path, "yarn_beta_slow", 1.0)}
    attention = _number(hyper, path, "attn_factor", 1.0)
    if attention != 1.0:
        found["attention_factor"] = attention * (1.0 + 0.1 * math.log(factor))
    return found


def _llama3(hyper: GgufHyperparameters, factors_f: NDArray[np.float64], path: Path) -> dict[str, Any]:
    """Solve for the numbers.  With low_freq_factor 1 (only ratios count) the blend of a frequency is
    `(original / wavelength - 1) / (high - 1)`, a straight line in 1 / wavelength over the blended ones."""
    turns_f = hyper.rope_theta ** (-np.arange(0, hyper.head_size, 2) / hyper.head_size) / (2 * math.pi)
    factor = float(factors_f.max())
    between = (factors_f > 1) & (factors_f < factor)
    if factors_f.shape != turns_f.shape or factor <= 1 or between.sum() < 2:
        raise CheckpointError(f"{path}: rope_freqs.weight does not look like llama3 rope scaling; use the safetensors "
                              "folder")
    blend = (1 / factors_f[between] - 1 / factor) / (1 - 1 / factor)
    slope, offset = np.polyfit(turns_f[between], blend, 1)
    found = {"rope_type": "llama3", "factor": round(factor, 4), "low_freq_factor": 1.0,
             "high_freq_factor": round(float(1 - 1 / offset), 3),
             "original_max_position_embeddings": round(float(-slope / offset))}
    error = np.abs(_llama3_factors(found, turns_f) / factors_f - 1).max()
    if not error < TOLERANCE:
        raise CheckpointError(f"{path}: rope_freqs.weight is not of llama3 rope scaling (factors off by {error:.1e}); "
                              "use the safetensors folder")
    return found


def _llama3_factors(rope: dict[str, Any], turns_f: NDArray[np.float64]) -> NDArray[np.float64]:
    blend_f = (rope["original_max_position_embeddings"] * turns_f - 1) / (rope["high_freq_factor"] - 1)
    blend_f = blend_f.clip(0, 1)
    return np.asarray(1 / ((1 - blend_f) / rope["factor"] + blend_f))
