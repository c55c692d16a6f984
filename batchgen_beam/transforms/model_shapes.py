"""The shapes that a model's kernels will meet, for their self-test.

Owns the reading of sizes from a configuration.  Does not know weights or how a model is computed.
"""

from __future__ import annotations

from batchgen_beam.config.base import DecoderConfig, ModelConfig
from batchgen_beam.config.families.deepseek import MlaConfig
from batchgen_beam.config.families.gpt_oss import GptOssConfig
from batchgen_beam.config.families.mistral import MixtralConfig
from batchgen_beam.config.families.qwen import Qwen3MoeConfig
from batchgen_beam.kernels.self_test import AttentionShape, ExpertShape, ModelShapes
from batchgen_beam.models.interface import Activation

__all__ = ["model_shapes"]

Products = tuple[tuple[int, int], ...]


def model_shapes(config: ModelConfig) -> ModelShapes:
    """Products (N, K), norms, activations, attention and experts of a decoder; only the head where no kernel is
    used."""
    head = (config.vocab_size, config.hidden_size)
    if not isinstance(config, DecoderConfig):
        return ModelShapes(linear=(), head=head, norms=(), activations=(), attention=())
    width, inner = config.hidden_size, _dense_widths(config)
    dense = tuple(product for size in inner for product in ((2 * size, width), (width, size)))
    if isinstance(config, MlaConfig):
        ranks = (config.kv_lora_rank,) if config.q_lora_rank is None else (config.q_lora_rank, config.kv_lora_rank)
        return ModelShapes(linear=_latent_products(config) + dense, head=head, norms=(width, *ranks),
                           activations=inner, attention=(_latent(config),), experts=_experts(config))
    size = config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    products = ((heads + 2 * kv_heads) * size, width), (width, heads * size)
    norms = (width, size) if isinstance(config, Qwen3MoeConfig) else (width,)
    attention = tuple(AttentionShape(heads=heads, kv_heads=kv_heads, size=size, window=window,
                                     sinks=isinstance(config, GptOssConfig)) for window in _windows(config))
    return ModelShapes(linear=products + dense, head=head, norms=norms, activations=inner, attention=attention,
                       experts=_experts(config))


def _dense_widths(config: DecoderConfig) -> tuple[int, ...]:
    """Inner sizes of feed-forward parts that all tokens go through."""
    match config:
        case MixtralConfig() | GptOssConfig():
            return ()
        case MlaConfig():
            shared = config.n_shared_experts * config.moe_intermediate_size
            return ((config.intermediate_size,) if config.first_k_dense_replace else ()) + ((shared,) if shared else ())
        case Qwen3MoeConfig() if all(config.is_sparse(layer) for layer in range(config.num_hidden_layers)):
            return ()
    return (config.intermediate_size,)


def _windows(config: DecoderConfig) -> tuple[int | None, ...]:
    """How far layers see, each distance once."""
    match config:
        case MixtralConfig():
            return (config.sliding_window,)
        case Qwen3MoeConfig():
            return (config.window,)
        case GptOssConfig():
            return tuple(dict.fromkeys(config.window_of(layer) for layer in range(config.num_hidden_layers)))
    return (None,)


def _latent(config: MlaConfig) -> AttentionShape:
    return AttentionShape(heads=config.num_attention_heads, kv_heads=1, value_size=config.kv_lora_rank,
                          size=config.kv_lora_rank + config.qk_rope_head_dim)


def _latent_products(config: MlaConfig) -> Products:
    width, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    plain, rotated, value, rank = (config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim,
                                   config.q_lora_rank)
    queries = heads * (plain + rotated)
    query: Products = ((queries, width),) if rank is None else ((rank, width), (queries, rank))
    return (*query, (latent + rotated, width), (latent, plain), (value, latent), (width, heads * value))


def _experts(config: DecoderConfig) -> ExpertShape | None:
    width = config.hidden_size
    match config:
        case MixtralConfig():
            return ExpertShape(count=config.num_local_experts, chosen=config.num_experts_per_tok, size=width,
                               inner=config.intermediate_size)
        case Qwen3MoeConfig():
            return ExpertShape(count=config.num_experts, chosen=config.num_experts_per_tok, size=width,
                               inner=config.moe_intermediate_size)
        case MlaConfig():
            return ExpertShape(count=config.n_routed_experts, chosen=config.num_experts_per_tok or 1, size=width,
                               inner=config.moe_intermediate_size)
        case GptOssConfig():
            clamped = Activation(alpha=config.swiglu_alpha, limit=config.swiglu_limit, shift=1.0)
            return ExpertShape(count=config.num_local_experts, chosen=config.num_experts_per_tok, size=width,
                               inner=config.intermediate_size, activation=clamped)
    return None
