"""A dense decoder as plain data: what a kernel set needs to run all of it in one call.

Owns the order of operations that such a call promises, which is that of `models.llama`.  Does not know kernel sets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from batchgen_beam.models.caches import GroupKey

__all__ = ["DenseDecoder", "DenseLayer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """One block: norms [D], and weights as the kernel set packed them; `qkv` has three parts, `gate_up` two."""

    attention_norm_D: Tensor
    qkv: Any
    out: Any
    feed_forward_norm_D: Tensor
    gate_up: Any
    down: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseDecoder:
    """Pre-norm blocks with rotary grouped-query attention and a gated SiLU feed-forward part.

    Cache entries "k" and "v" of shape (kv_heads, head_size) belong to `group` and are of the kernel set's `kv_dtype`;
    scores are scaled by head_size ** -0.5.
    `cos_Cf` and `sin_Cf` are float32, by position.
    """

    layers: tuple[DenseLayer, ...]
    heads: int
    kv_heads: int
    head_size: int
    group: GroupKey
    epsilon: float
    table_VD: Tensor
    norm_D: Tensor
    head: Any
    cos_Cf: Tensor
    sin_Cf: Tensor
