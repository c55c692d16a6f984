"""Qwen3-MoE: queries and keys normed head by head; layers with experts, and layers without among them."""

from __future__ import annotations

from functools import partial

from batchgen_beam.config.families.qwen import Qwen3MoeConfig
from batchgen_beam.models.decoder import Block, Decoder, FeedForward
from batchgen_beam.models.feed_forward import GatedFeedForward
from batchgen_beam.models.grouped_attention import GroupedAttention
from batchgen_beam.models.interface import KernelSet
from batchgen_beam.models.parameters import Parameters, TensorSource
from batchgen_beam.models.routing import RouterRule, Scoring
from batchgen_beam.models.sparse import SparseFeedForward

__all__ = ["Qwen3MoeModel"]


class Qwen3MoeModel(Decoder[GroupedAttention, FeedForward]):
    """Parameters of a block: those of `GroupedAttention`, and those of
    `SparseFeedForward` or `feed_forward.{gate,up,down}`."""

    def __init__(self, config: Qwen3MoeConfig, get: TensorSource, kernels: KernelSet) -> None:
        super().__init__(config, Parameters(get, kernels), partial(_block, config))


def _block(config: Qwen3MoeConfig, source: Parameters, index: int) -> Block[GroupedAttention, FeedForward]:
    return Block(source, config.rms_norm_eps,
                 lambda part: GroupedAttention(part, config, window=config.window, normed_heads=True),
                 lambda part: _feed_forward(config, part, index))


def _feed_forward(config: Qwen3MoeConfig, source: Parameters, index: int) -> FeedForward:
    if not config.is_sparse(index):
        return GatedFeedForward(source.under("feed_forward"))
    rule = RouterRule(chosen=config.num_experts_per_tok, scoring=Scoring.SOFTMAX, renormalised=config.norm_topk_prob)
    return SparseFeedForward(source, rule, config.num_experts)
