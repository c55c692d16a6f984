"""Mixtral: grouped-query attention, and in every layer experts of which the best few are renormalised."""

from __future__ import annotations

from functools import partial

from batchgen_beam.config.families.mistral import MixtralConfig
from batchgen_beam.models.decoder import Block, Decoder
from batchgen_beam.models.grouped_attention import GroupedAttention
from batchgen_beam.models.interface import KernelSet
from batchgen_beam.models.parameters import Parameters, TensorSource
from batchgen_beam.models.routing import RouterRule, Scoring
from batchgen_beam.models.sparse import SparseFeedForward

__all__ = ["MixtralModel"]


class MixtralModel(Decoder[GroupedAttention, SparseFeedForward]):
    """Parameters of a block: those of `GroupedAttention` and `SparseFeedForward`."""

    def __init__(self, config: MixtralConfig, get: TensorSource, kernels: KernelSet) -> None:
        super().__init__(config, Parameters(get, kernels), partial(_block, config))


def _block(config: MixtralConfig, source: Parameters, index: int) -> Block[GroupedAttention, SparseFeedForward]:
    del index  # all blocks are alike
    rule = RouterRule(chosen=config.num_experts_per_tok, scoring=Scoring.SOFTMAX, renormalised=True)
    return Block(source, config.rms_norm_eps,
                 lambda part: GroupedAttention(part, config, window=config.sliding_window),
                 lambda part: SparseFeedForward(part, rule, config.num_local_experts))
