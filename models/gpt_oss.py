"""GPT-OSS: attention with sinks, windows in some layers, biases everywhere, and experts with a clamped activation."""

from __future__ import annotations

from functools import partial

from batchgen_beam.config.families.gpt_oss import GptOssConfig
from batchgen_beam.models.decoder import Block, Decoder
from batchgen_beam.models.experts import Activation
from batchgen_beam.models.grouped_attention import GroupedAttention
from batchgen_beam.models.interface import KernelSet
from batchgen_beam.models.parameters import Parameters, TensorSource
from batchgen_beam.models.routing import RouterRule, Scoring
from batchgen_beam.models.sparse import SparseFeedForward

__all__ = ["GptOssModel"]


class GptOssModel(Decoder[GroupedAttention, SparseFeedForward]):
    """Parameters of a block: those of `GroupedAttention` and `SparseFeedForward`, with sinks and biases."""

    def __init__(self, config: GptOssConfig, get: TensorSource, kernels: KernelSet) -> None:
        super().__init__(config, Parameters(get, kernels), partial(_block, config))


def _block(config: GptOssConfig, source: Parameters, index: int) -> Block[GroupedAttention, SparseFeedForward]:
    rule = RouterRule(chosen=config.num_experts_per_tok, scoring=Scoring.SOFTMAX_OF_CHOSEN)
    activation = Activation(alpha=config.swiglu_alpha, limit=config.swiglu_limit, shift=1.0)
    return Block(source, config.rms_norm_eps,
                 lambda part: GroupedAttention(part, config, window=config.window_of(index), sinks=True),
                 lambda part: SparseFeedForward(part, rule, config.num_local_experts, biased=True,
                                                activation=activation))
