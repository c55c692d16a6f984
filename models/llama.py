"""The Llama architecture: grouped-query attention with rotary positions, and a gated SiLU feed-forward part.

Covers Llama 2 and 3.x, SmolLM2, TinyLlama, R1-Distill-Llama.  Does not know checkpoint names, files or kernels.
"""

from __future__ import annotations

from functools import partial

from batchgen_beam.config.families.llama import LlamaConfig
from batchgen_beam.models.decoder import Block, Decoder
from batchgen_beam.models.dense import DenseDecoder, DenseLayer
from batchgen_beam.models.feed_forward import GatedFeedForward
from batchgen_beam.models.grouped_attention import GroupedAttention
from batchgen_beam.models.interface import BatchView, CacheKind, GroupKey, KernelSet, Scores
from batchgen_beam.models.parameters import Parameters, TensorSource

__all__ = ["LlamaModel"]

LlamaBlock = Block[GroupedAttention, GatedFeedForward]


class LlamaModel(Decoder[GroupedAttention, GatedFeedForward]):
    """Parameters of a block beside those of `Decoder`: `attention.{q,k,v,o}`, `feed_forward.{gate,up,down}`."""

    def __init__(self, config: LlamaConfig, get: TensorSource, kernels: KernelSet) -> None:
        super().__init__(config, Parameters(get, kernels), partial(_block, config))
        self._config = config
        self._fused = kernels.fuse(self.dense())

    def dense(self) -> DenseDecoder:
        """The same model as data."""
        config = self._config
        return DenseDecoder(
            layers=tuple(_dense(layer) for layer in self._layers), heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads, head_size=config.head_dim, group=GroupKey(CacheKind.PAGED),
            epsilon=config.rms_norm_eps, table_VD=self._table_VD, norm_D=self._norm_D, head=self._head,
            cos_Cf=self._rope.cos_Cf, sin_Cf=self._rope.sin_Cf)

    def forward(self, view: BatchView) -> Scores:
        """One pass, in one call where the kernel set can."""
        return super().forward(view) if self._fused is None else self._fused(view)


def _block(config: LlamaConfig, source: Parameters, index: int) -> LlamaBlock:
    del index  # all blocks are alike
    return Block(source, config.rms_norm_eps, lambda part: GroupedAttention(part, config),
                 lambda part: GatedFeedForward(part.under("feed_forward"), biased=config.mlp_bias))


def _dense(layer: LlamaBlock) -> DenseLayer:
    """A block's weights as data."""
    return DenseLayer(attention_norm_D=layer.attention_norm_D, qkv=layer.mix.qkv, out=layer.mix.out,
                      feed_forward_norm_D=layer.feed_forward_norm_D, gate_up=layer.expand.gate_up,
                      down=layer.expand.down)
