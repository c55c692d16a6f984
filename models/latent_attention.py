"""Multi-head latent attention (arXiv:2405.04434, section 2.1) over the compressed cache.

A token keeps one latent vector and one rotated key for all heads.  Keys and values of the heads are never expanded:
their projections are absorbed into the query and the output, `(q W_k) . c` for `q . (c W_k)` and `(p . c) W_v` for
`p . (c W_v)`, for prompt and generated tokens alike, so that every token has one arithmetic.  All heads share one cache
entry, whose first `kv_lora_rank` values are also what is mixed.  Does not know what stands around it.

Shape suffixes: T tokens, D hidden size, H heads, n part of a head without and r with rotation, c latent size, e = c + r
size of an entry, v value size, N outputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from batchgen_beam.config.families.deepseek import MlaConfig
from batchgen_beam.models.interface import BatchView, CacheKind, CacheSpec, PackedWeight
from batchgen_beam.models.parameters import Parameters
from batchgen_beam.models.rope import yarn_temperature

__all__ = ["LatentAttention"]

NORM_EPSILON = 1e-6
"""Of the norms between low-rank projections, whatever the configuration says of the others (reference code)."""


class LatentAttention:
    """Parameters: `q`, or `q_a`, `q_norm`, `q_b`; `kv_a`, `kv_norm`, `kv_b`, `o`; `q_a`, `kv_a` and `o` with biases by
    `config.attention_bias`.  Rotated values are interleaved pairs."""

    def __init__(self, source: Parameters, config: MlaConfig) -> None:
        self._config = config
        self._kernels = source.kernels
        self._scale = _scale(config)
        self._low_rank = config.q_lora_rank is not None
        if self._low_rank:
            self._q_a = source.packed("q_a", biased=config.attention_bias)
            self._q_norm = source.tensor("q_norm")
        self._q = source.packed("q_b" if self._low_rank else "q")
        self._kv_a = source.packed("kv_a", biased=config.attention_bias)
        self._kv_norm_c = source.tensor("kv_norm")
        self._to_latent, self._to_value = self._absorbed(source.tensor("kv_b"))
        self._out = source.packed("o", biased=config.attention_bias)
        self._entries = CacheSpec(name="latent", kind=CacheKind.PAGED, dtype=self._kernels.kv_dtype,
                                  shape=(1, config.kv_lora_rank + config.qk_rope_head_dim))
        self._values = replace(self._entries, shape=(1, config.kv_lora_rank))

    def _absorbed(self, kv_b_Nc: Tensor) -> tuple[list[PackedWeight], list[PackedWeight]]:
        """For each head, from its query to the latent space and from there to its value."""
        config = self._config
        parts = kv_b_Nc.view(config.num_attention_heads, config.qk_nope_head_dim + config.v_head_dim, -1)
        keys_Hnc, values_Hvc = parts.split((config.qk_nope_head_dim, config.v_head_dim), 1)
        pack = self._kernels.pack
        return [pack([keys_nc.T.contiguous()]) for keys_nc in keys_Hnc], [pack([values]) for values in values_Hvc]

    def cache_spec(self) -> Sequence[CacheSpec]:
        """The normed latent vector and the rotated key of every token, `(1, e)`."""
        return (self._entries,)

    def __call__(self, normed_TD: Tensor, carries: Mapping[str, Tensor], view: BatchView,
                 cache: Mapping[str, Tensor]) -> Tensor:
        """Append the batch's entries, then attend over each token's row, [T, D]."""
        kernels, config = self._kernels, self._config
        q_THn, q_THr = self._queries(normed_TD).split((config.qk_nope_head_dim, config.qk_rope_head_dim), -1)
        c_Tc, k_Tr = kernels.linear(normed_TD, self._kv_a).split((config.kv_lora_rank, config.qk_rope_head_dim), -1)
        c_Tc = kernels.rms_norm(c_Tc.contiguous(), self._kv_norm_c, NORM_EPSILON)
        rotated_THr = self._rotated(torch.cat((q_THr, k_Tr[:, None]), 1), carries)
        kernels.append(cache["latent"], torch.cat((c_Tc[:, None], rotated_THr[:, -1:]), -1), self._entries, view)
        queries_THe = torch.cat((self._by_head(q_THn, self._to_latent), rotated_THr[:, :-1]), -1)
        mixed_THc = kernels.attention(queries_THe, (self._entries, cache["latent"]), (self._values, cache["latent"]),
                                      view, self._scale)
        return kernels.linear(self._by_head(mixed_THc, self._to_value).flatten(1), self._out)

    def _queries(self, normed_TD: Tensor) -> Tensor:
        """[T, H, n + r]."""
        kernels, x = self._kernels, normed_TD
        if self._low_rank:
            x = kernels.rms_norm(kernels.linear(x, self._q_a), self._q_norm, NORM_EPSILON)
        return kernels.linear(x, self._q).view(len(x), self._config.num_attention_heads, -1)

    def _rotated(self, x_THr: Tensor, carries: Mapping[str, Tensor]) -> Tensor:
        """Pairs that lie side by side are taken apart first; queries and keys stay in that order, which no dot product
        sees."""
        halves_THr = x_THr.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return self._kernels.rope(halves_THr, carries["cos_Tf"], carries["sin_Tf"])

    def _by_head(self, x_THd: Tensor, weights: Sequence[PackedWeight]) -> Tensor:
        """Each head's own product."""
        return torch.stack([self._kernels.linear(x_THd[:, head].contiguous(), weight)
                            for head, weight in enumerate(weights)], 1)


def _scale(config: MlaConfig) -> float:
    """Of scores: head size ** -0.5, times the square of YaRN's temperature where `mscale_all_dim` is given."""
    rope, size = config.rope, config.qk_nope_head_dim + config.qk_rope_head_dim
    temperature = yarn_temperature(rope.factor, rope.mscale_all_dim) if rope.mscale_all_dim else 1.0
    return temperature * temperature / math.sqrt(size)
