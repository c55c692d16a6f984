"""Grouped-query attention with rotary positions: query heads share the keys and values of their group.

Covers biases, norms of each head's queries and keys before the rotation (Qwen3), a sliding window, and sinks: one score
per head that takes part in the softmax and has no value (GPT-OSS).  Does not know what stands around it.

Shape suffixes: T tokens, D hidden size, H query heads, G key/value heads, d head size, N outputs of a stacked
projection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from batchgen_beam.config.base import DecoderConfig
from batchgen_beam.models.interface import BatchView, CacheKind, CacheSpec
from batchgen_beam.models.parameters import Parameters

__all__ = ["GroupedAttention"]


class GroupedAttention:
    """Parameters: `q`, `k`, `v`, `o` (with biases by `config.attention_bias`), `q_norm`, `k_norm`, `sinks`.

    `window` in tokens, None sees everything.
    """

    def __init__(self, source: Parameters, config: DecoderConfig, *, window: int | None = None,
                 normed_heads: bool = False, sinks: bool = False) -> None:
        self._kernels = source.kernels
        self._heads, self._groups, self._size = (config.num_attention_heads, config.num_key_value_heads,
                                                 config.head_dim)
        self._epsilon = config.rms_norm_eps
        self.qkv = source.packed("q", "k", "v", biased=config.attention_bias)
        self.out = source.packed("o", biased=config.attention_bias)
        self._norms_d = (source.tensor("q_norm"), source.tensor("k_norm")) if normed_heads else None
        self._sinks_H = source.tensor("sinks") if sinks else None
        kind = CacheKind.PAGED if window is None else CacheKind.WINDOWED
        self._keys, self._values = (
            CacheSpec(name=name, kind=kind, dtype=self._kernels.kv_dtype, shape=(self._groups, self._size),
                      window=window) for name in ("k", "v"))

    def cache_spec(self) -> Sequence[CacheSpec]:
        """Rotated keys and values of every token, `(G, d)` each."""
        return self._keys, self._values

    def __call__(self, normed_TD: Tensor, carries: Mapping[str, Tensor], view: BatchView,
                 cache: Mapping[str, Tensor]) -> Tensor:
        """Append the batch's keys and values, then attend over each token's row, [T, D]."""
        kernels, heads, groups, size = self._kernels, self._heads, self._groups, self._size
        qkv_TN = kernels.linear(normed_TD, self.qkv)
        qk_TN, v_TN = qkv_TN[:, :(heads + groups) * size], qkv_TN[:, (heads + groups) * size:]
        qk_THd = self._normed(qk_TN.view(-1, heads + groups, size))
        qk_THd = kernels.rope(qk_THd, carries["cos_Tf"], carries["sin_Tf"])
        kernels.append(cache["k"], qk_THd[:, heads:], self._keys, view)
        kernels.append(cache["v"], v_TN.view(-1, groups, size), self._values, view)
        mixed_THd = kernels.attention(qk_THd[:, :heads], (self._keys, cache["k"]), (self._values, cache["v"]), view,
                                      size ** -0.5, sinks_H=self._sinks_H)
        return kernels.linear(mixed_THd.flatten(1), self.out)

    def _normed(self, qk_THd: Tensor) -> Tensor:
        """Queries and keys, each head normed by itself where the model does so."""
        if self._norms_d is None:
            return qk_THd
        parts = qk_THd.split((self._heads, self._groups), 1)
        return torch.cat([self._kernels.rms_norm(part.reshape(-1, self._size), norm_d, self._epsilon).view(part.shape)
                          for part, norm_d in zip(parts, self._norms_d, strict=True)], 1)
