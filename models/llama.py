"""The Llama architecture: grouped-query attention with rotary positions, and a gated SiLU feed-forward part.

Covers Llama 2 and 3.x, SmolLM2, TinyLlama, R1-Distill-Llama.  Owns the order of operations of one block and the
canonical parameter names.  Does not know checkpoint names, files, kernels or batches' origin.

Shape suffixes: T tokens, W wanted tokens, D hidden size, H query heads, G key/value heads, d head size, f = d / 2,
N outputs of a stacked projection, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from batchgen_beam.config.families.llama import LlamaConfig
from batchgen_beam.models.dense import DenseDecoder, DenseLayer
from batchgen_beam.models.interface import (
    BatchView,
    CacheKind,
    CacheSpec,
    GroupKey,
    KernelSet,
    LayerState,
    PackedWeight,
    Scores,
    run_layers,
)
from batchgen_beam.models.rope import rope_tables

__all__ = ["LlamaLayer", "LlamaModel", "TensorSource"]

TensorSource = Callable[[str], Tensor]
"""Canonical parameter name -> its tensor in the run's dtype; asked once per name, in the order of the layers."""


class LlamaLayer:
    """One block: `x + attention(norm(x))`, then `x + feed_forward(norm(x))`."""

    def __init__(self, config: LlamaConfig, get: TensorSource, kernels: KernelSet, prefix: str) -> None:
        self._config = config
        self._kernels = kernels
        self._attention_norm_D = get(f"{prefix}.attention_norm")
        self._qkv = self._pack(get, prefix, ("attention.q", "attention.k", "attention.v"), config.attention_bias)
        self._out = self._pack(get, prefix, ("attention.o",), config.attention_bias)
        self._feed_forward_norm_D = get(f"{prefix}.feed_forward_norm")
        self._gate_up = self._pack(get, prefix, ("feed_forward.gate", "feed_forward.up"), config.mlp_bias)
        self._down = self._pack(get, prefix, ("feed_forward.down",), config.mlp_bias)
        self._keys, self._values = (
            CacheSpec(name=name, kind=CacheKind.PAGED, dtype=kernels.kv_dtype,
                      shape=(config.num_key_value_heads, config.head_dim)) for name in ("k", "v"))

    def _pack(self, get: TensorSource, prefix: str, names: Sequence[str], biased: bool) -> PackedWeight:
        weights = [get(f"{prefix}.{name}") for name in names]
        biases = [get(f"{prefix}.{name}.bias") for name in names] if biased else None
        return self._kernels.pack(weights, biases=biases)

    def cache_spec(self) -> Sequence[CacheSpec]:
        """Rotated keys and values of every token, `(G, d)` each."""
        return self._keys, self._values

    def dense(self) -> DenseLayer:
        """The block's weights as data."""
        return DenseLayer(attention_norm_D=self._attention_norm_D, qkv=self._qkv, out=self._out,
                          feed_forward_norm_D=self._feed_forward_norm_D, gate_up=self._gate_up, down=self._down)

    def attention(self, x: LayerState, view: BatchView, index: int) -> LayerState:
        """Append the batch's keys and values, then attend over each token's row."""
        config, kernels, cache = self._config, self._kernels, view.caches[index]
        heads, groups, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        normed_TD = kernels.rms_norm(x.hidden_TD, self._attention_norm_D, config.rms_norm_eps)
        qkv_TN = kernels.linear(normed_TD, self._qkv)
        qk_TN, v_TN = qkv_TN[:, :(heads + groups) * size], qkv_TN[:, (heads + groups) * size:]
        qk_THd = kernels.rope(qk_TN.view(-1, heads + groups, size), x.carries["cos_Tf"], x.carries["sin_Tf"])
        kernels.append(cache["k"], qk_THd[:, heads:], self._keys, view)
        kernels.append(cache["v"], v_TN.view(-1, groups, size), self._values, view)
        mixed_THd = kernels.attention(qk_THd[:, :heads], (self._keys, cache["k"]), (self._values, cache["v"]), view,
                                      size ** -0.5)
        return LayerState(x.hidden_TD + kernels.linear(mixed_THd.flatten(1), self._out), x.carries)

    def feed_forward(self, x: LayerState) -> LayerState:
        """The gated feed-forward part, token by token."""
        kernels = self._kernels
        normed_TD = kernels.rms_norm(x.hidden_TD, self._feed_forward_norm_D, self._config.rms_norm_eps)
        inner_TN = kernels.swiglu(kernels.linear(normed_TD, self._gate_up))
        return LayerState(x.hidden_TD + kernels.linear(inner_TN, self._down), x.carries)


class LlamaModel:
    """Blocks between an embedding table and an output projection, which is the table itself if tied.

    Parameter names: `embedding`, `norm`, `head` (untied only), and under `layers.<i>.`: `attention_norm`,
    `attention.{q,k,v,o}`, `feed_forward_norm`, `feed_forward.{gate,up,down}`; a projection's bias adds `.bias`.
    """

    def __init__(self, config: LlamaConfig, get: TensorSource, kernels: KernelSet) -> None:
        self.vocab_size = config.vocab_size
        self.context_limit = config.max_position_embeddings
        self._config = config
        self._kernels = kernels
        self._rope = rope_tables(config.rope, config.head_dim, self.context_limit, kernels.device)
        self._table_VD = get("embedding")
        self._layers = [LlamaLayer(config, get, kernels, f"layers.{i}") for i in range(config.num_hidden_layers)]
        self._norm_D = get("norm")
        self._head = kernels.pack_head(self._table_VD if config.tie_word_embeddings else get("head"))
        self._fused = kernels.fuse(self.dense())

    def dense(self) -> DenseDecoder:
        """The same model as data."""
        config = self._config
        return DenseDecoder(
            layers=tuple(layer.dense() for layer in self._layers), heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads, head_size=config.head_dim, group=GroupKey(CacheKind.PAGED),
            epsilon=config.rms_norm_eps, table_VD=self._table_VD, norm_D=self._norm_D, head=self._head,
            cos_Cf=self._rope.cos_Cf, sin_Cf=self._rope.sin_Cf)

    @property
    def layers(self) -> Sequence[LlamaLayer]:
        """Blocks in order."""
        return self._layers

    def embed(self, view: BatchView) -> LayerState:
        """Token embeddings; each token's cosines and sines travel with it as carries."""
        positions_T = view.positions_T
        return LayerState(self._kernels.embed(self._table_VD, view.token_ids_T),
                          {"cos_Tf": torch.index_select(self._rope.cos_Cf, 0, positions_T),
                           "sin_Tf": torch.index_select(self._rope.sin_Cf, 0, positions_T)})

    def head(self, x: LayerState, view: BatchView) -> Scores:
        """What the wanted tokens come to."""
        wanted_WD = torch.index_select(x.hidden_TD, 0, view.wanted_W)
        normed_WD = self._kernels.rms_norm(wanted_WD, self._norm_D, self._config.rms_norm_eps)
        return self._kernels.scores(normed_WD, self._head, view)

    def forward(self, view: BatchView) -> Scores:
        """One pass, in one call where the kernel set can."""
        return run_layers(self, view) if self._fused is None else self._fused(view)
