"""Rotary position embedding: frequencies by kind, and tables of cosines and sines by position.

Owns the formulas.  Does not know configuration files, layers or how a kernel set rotates.
Frequencies are computed in float32 in the order of operations of the reference implementation (transformers,
`modeling_rope_utils`): at position 8,000 the last bit of a frequency is worth 5e-4 of an angle, so a "more exact"
frequency would move logits away from what the weights were trained with.

Shape suffixes: f rotated pairs (half a head), C positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen_beam.config.rope import RopeParameters

__all__ = ["RopeTables", "rope_frequencies", "rope_tables", "yarn_temperature"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTables:
    """`cos_Cf` and `sin_Cf`, float32: a token's values depend on nothing but its position."""

    cos_Cf: Tensor
    sin_Cf: Tensor


def rope_tables(rope: RopeParameters, head_size: int, context_limit: int, device: torch.device) -> RopeTables:
    """Tables for every position below `context_limit`.

    The angle is a float32 product, as in the reference; its cosine is taken in float64 and rounded once, so that the
    table does not depend on the vector library.
    """
    frequencies_f, attention_factor = rope_frequencies(rope, head_size, context_limit)
    angles_Cf = torch.outer(torch.arange(context_limit, dtype=torch.float32), frequencies_f).double()
    cos_Cf, sin_Cf = ((part * attention_factor).float().to(device) for part in (angles_Cf.cos(), angles_Cf.sin()))
    return RopeTables(cos_Cf=cos_Cf, sin_Cf=sin_Cf)


def rope_frequencies(rope: RopeParameters, head_size: int, context_limit: int) -> tuple[Tensor, float]:
    """Inverse frequencies float32 [f], and the factor on cosine and sine.

    `context_limit` is the length that a run may reach; only `dynamic` looks at it.
    """
    return _KINDS[rope.rope_type](rope, head_size, context_limit)


def _periods(theta: float, head_size: int) -> Tensor:
    return theta ** (torch.arange(0, head_size, 2, dtype=torch.float32) / head_size)


def _default(rope: RopeParameters, head_size: int, context_limit: int) -> tuple[Tensor, float]:
    return 1.0 / _periods(rope.theta, head_size), 1.0


def _linear(rope: RopeParameters, head_size: int, context_limit: int) -> tuple[Tensor, float]:
    """Position interpolation (arXiv:2306.15595)."""
    return 1.0 / _periods(rope.theta, head_size) / rope.factor, 1.0


def _dynamic(rope: RopeParameters, head_size: int, context_limit: int) -> tuple[Tensor, float]:
    """NTK-aware base, for the longest context that the run may reach and never for a batch's longest row."""
    original = rope.original_max_position_embeddings or context_limit
    stretch = rope.factor * max(context_limit, original) / original - (rope.factor - 1)
    return 1.0 / _periods(rope.theta * stretch ** (head_size / (head_size - 2)), head_size), 1.0


def _llama3(rope: RopeParameters, head_size: int, context_limit: int) -> tuple[Tensor, float]:
    """Long wavelengths stretched, short ones kept, between them blended (Llama 3.1 reference code)."""
    original = _original_length(rope)
    plain_f = 1.0 / _periods(rope.theta, head_size)
    wavelength_f = 2 * math.pi / plain_f
    blend_f = (original / wavelength_f - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended_f = (1 - blend_f) * plain_f / rope.factor + blend_f * plain_f
    scaled_f = torch.where(wavelength_f > original / rope.low_freq_factor, plain_f / rope.factor, blended_f)
    return torch.where(wavelength_f < original / rope.high_freq_factor, plain_f, scaled_f), 1.0


def _yarn(rope: RopeParameters, head_size: int, context_limit: int) -> tuple[Tensor, float]:
    """A ramp over the dimensions between plain and stretched frequencies (arXiv:2309.00071, section 3.2)."""
    low, high = (_yarn_dimension(rope, turns, head_size) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    width = high - low if high != low else 0.001
    ramp_f = ((torch.arange(head_size // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    periods_f = _periods(rope.theta, head_size)
    keep_f = 1 - ramp_f
    return 1.0 / (rope.factor * periods_f) * (1 - keep_f) + 1.0 / periods_f * keep_f, _yarn_attention_factor(rope)


def _yarn_dimension(rope: RopeParameters, turns: float, head_size: int) -> float:
    """The (fractional) pair that makes `turns` turns over the original context."""
    return head_size * math.log(_original_length(rope) / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_attention_factor(rope: RopeParameters) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_temperature(rope.factor, rope.mscale) / yarn_temperature(rope.factor, rope.mscale_all_dim)
    return yarn_temperature(rope.factor, 1.0)


def yarn_temperature(factor: float, weight: float) -> float:
    """How much longer contexts sharpen scores: `0.1 weight ln(factor) + 1` (arXiv:2309.00071, section 3.4)."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _original_length(rope: RopeParameters) -> int:
    assert rope.original_max_position_embeddings is not None  # its config demands it for these kinds
    return rope.original_max_position_embeddings


_KINDS: dict[str, Callable[[RopeParameters, int, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
