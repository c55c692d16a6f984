"""DeepSeek-V2, V2-Lite, V3 and R1, and Kimi-K2 and the text part of K2.5, which are V3 code: latent attention, dense
layers first, then experts beside a shared one."""

from __future__ import annotations

from functools import partial

from batchgen_beam.config.families.deepseek import DeepseekV2Config, MlaConfig
from batchgen_beam.models.decoder import Block, Decoder, FeedForward
from batchgen_beam.models.feed_forward import GatedFeedForward
from batchgen_beam.models.interface import KernelSet
from batchgen_beam.models.latent_attention import LatentAttention
from batchgen_beam.models.parameters import Parameters, TensorSource
from batchgen_beam.models.routing import RouterRule, Scoring
from batchgen_beam.models.sparse import SparseFeedForward

__all__ = ["DeepseekModel"]


class DeepseekModel(Decoder[LatentAttention, FeedForward]):
    """Parameters of a block: those of `LatentAttention`, and those of
    `SparseFeedForward` or `feed_forward.{gate,up,down}`."""

    def __init__(self, config: MlaConfig, get: TensorSource, kernels: KernelSet) -> None:
        super().__init__(config, Parameters(get, kernels), partial(_block, config))


def _block(config: MlaConfig, source: Parameters, index: int) -> Block[LatentAttention, FeedForward]:
    return Block(source, config.rms_norm_eps, lambda part: LatentAttention(part, config),
                 lambda part: _feed_forward(config, part, index))


def _feed_forward(config: MlaConfig, source: Parameters, index: int) -> FeedForward:
    if not config.is_sparse(index):
        return GatedFeedForward(source.under("feed_forward"))
    return SparseFeedForward(source, _rule(config), config.n_routed_experts, corrected=config.has_correction,
                             shared=config.n_shared_experts > 0)


def _rule(config: MlaConfig) -> RouterRule:
    assert config.num_experts_per_tok is not None  # `unsupported` names it
    if not isinstance(config, DeepseekV2Config):
        return RouterRule(chosen=config.num_experts_per_tok, scoring=Scoring.SIGMOID,
                          renormalised=config.norm_topk_prob, epsilon=1e-20, scale=config.routed_scaling_factor,
                          groups=config.n_group or 1, chosen_groups=config.topk_group or 1, group_leaders=2)
    grouped = config.topk_method == "group_limited_greedy"
    return RouterRule(chosen=config.num_experts_per_tok, scoring=Scoring.SOFTMAX, scale=config.routed_scaling_factor,
                      groups=(config.n_group or 1) if grouped else 1, chosen_groups=config.topk_group or 1)
