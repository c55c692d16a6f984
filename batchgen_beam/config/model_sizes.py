"""The sizes of a model from its configuration alone: no weights, no network.

Owns the putting together of a model's parts.  Does not know what a plan does with them.
"""

from __future__ import annotations

from batchgen_beam.config.attention_sizes import attention_sizes
from batchgen_beam.config.base import DecoderConfig, ModelConfig
from batchgen_beam.config.families.phi import PhiConfig
from batchgen_beam.config.feed_forward_sizes import feed_forward_sizes
from batchgen_beam.config.sizes import LayerSizes, Matrix, ModelSizes, Part
from batchgen_beam.errors import CheckpointError

__all__ = ["model_sizes"]


def model_sizes(config: ModelConfig) -> ModelSizes:
    """Every part of the model; layers beyond the last that predict further tokens are left out.

    Raises `CheckpointError` for a model type whose blocks are not known.
    """
    if not isinstance(config, DecoderConfig):
        raise CheckpointError(f"the sizes of model type {config.model_type!r} are not known")
    hidden, vocabulary = config.hidden_size, config.vocab_size
    biased = isinstance(config, PhiConfig)
    head = () if config.tie_word_embeddings else (Matrix("lm_head", vocabulary, hidden, biased, True),)
    return ModelSizes(
        hidden=hidden, vocabulary=vocabulary, context=config.max_position_embeddings,
        layers=tuple(_layer(config, layer) for layer in range(config.num_hidden_layers)),
        embedding=Part("model", (Matrix("embed_tokens", vocabulary, hidden, False, True),)),
        head=Part("", head, numbers=hidden * (2 if biased else 1)))


def _layer(config: DecoderConfig, layer: int) -> LayerSizes:
    attention, rest = attention_sizes(config, layer), feed_forward_sizes(config, layer)
    return LayerSizes(attention=attention.part, cache=attention.cache, context_flops=attention.context_flops,
                      width=attention.width, dense=rest.dense, router=rest.router, shared=rest.shared,
                      expert=rest.expert, experts=rest.experts, experts_per_token=rest.experts_per_token,
                      inner=rest.inner)
