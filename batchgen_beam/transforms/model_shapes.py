"""The shapes that a model's kernels will meet, for their self-test.

Owns the reading of sizes from a configuration.  Does not know weights or how a model is computed.
"""

from __future__ import annotations

from batchgen_beam.config.base import DecoderConfig, ModelConfig
from batchgen_beam.kernels.self_test import AttentionShape, ModelShapes

__all__ = ["model_shapes"]


def model_shapes(config: ModelConfig) -> ModelShapes:
    """Products (N, K), norms, activations and attention of a decoder; only the head where no kernel is used."""
    head = (config.vocab_size, config.hidden_size)
    if not isinstance(config, DecoderConfig):
        return ModelShapes(linear=(), head=head, norms=(), activations=(), attention=())
    width, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    products = ((heads + 2 * kv_heads) * size, width), (width, heads * size), (2 * inner, width), (width, inner)
    return ModelShapes(linear=products, head=head, norms=(width,), activations=(inner,),
                       attention=(AttentionShape(heads=heads, kv_heads=kv_heads, size=size),))
