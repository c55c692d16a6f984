"""Sizes of the attention half of each family's blocks.

Owns which projections, norms and cache entries there are.  Does not know the feed-forward half.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch

from batchgen_beam.config.base import DecoderConfig, ModelConfig
from batchgen_beam.config.families.deepseek import DeepseekV32Config, MlaConfig
from batchgen_beam.config.families.gemma import Gemma2Config, Gemma3Config
from batchgen_beam.config.families.glm import Glm4MoeConfig, GlmMoeDsaConfig
from batchgen_beam.config.families.gpt_oss import GptOssConfig
from batchgen_beam.config.families.kimi import KimiLinearConfig
from batchgen_beam.config.families.minimax import MiniMaxM2Config
from batchgen_beam.config.families.mistral import MistralConfig
from batchgen_beam.config.families.phi import Phi3Config, PhiConfig
from batchgen_beam.config.families.qwen import Qwen2Config, Qwen3Config, Qwen3MoeConfig
from batchgen_beam.config.families.smollm3 import SmolLM3Config
from batchgen_beam.config.sizes import Cache, Matrix, Part
from batchgen_beam.errors import CheckpointError

__all__ = ["AttentionSizes", "attention_sizes"]

_SLIDING = "sliding_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """The attention half of one block; see `LayerSizes`."""

    part: Part
    cache: Cache
    context_flops: int
    width: int


@singledispatch
def attention_sizes(config: ModelConfig, layer: int) -> AttentionSizes:
    """The half of block `layer`; `CheckpointError` for a model type whose blocks are not known."""
    raise CheckpointError(f"the sizes of model type {config.model_type!r} are not known")


@attention_sizes.register
def _grouped(config: DecoderConfig, layer: int) -> AttentionSizes:
    """Grouped-query attention: q, k, v and o, keys and values of G heads of d numbers each; GPT-OSS's sinks."""
    hidden, size = config.hidden_size, config.head_dim
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    biased, out_biased = _biases(config)
    out = "dense" if isinstance(config, PhiConfig) else "o_proj"
    part = Part(f"model.layers.{layer}.self_attn",
                (Matrix("q_proj", heads * size, hidden, biased), Matrix("k_proj", groups * size, hidden, biased),
                 Matrix("v_proj", groups * size, hidden, biased), Matrix(out, hidden, heads * size, out_biased)),
                numbers=_norms(config), exact=heads if isinstance(config, GptOssConfig) else 0)
    return AttentionSizes(part=part, cache=Cache(values=2 * groups * size, heads=2 * groups,
                                                 window=_window(config, layer)),
                          context_flops=4 * heads * size, width=hidden + (2 * heads + 2 * groups) * size)


def _biases(config: DecoderConfig) -> tuple[bool, bool]:
    """Whether q, k and v have biases, and whether the output projection has one."""
    match config:
        case PhiConfig():
            return True, True
        case Qwen2Config() if not isinstance(config, Qwen3Config):
            return True, False
        case Glm4MoeConfig():
            return config.attention_bias, False
        case Phi3Config() | MistralConfig() | MiniMaxM2Config():
            return False, False
    return config.attention_bias, config.attention_bias


def _norms(config: DecoderConfig) -> int:
    """Numbers of the half's norms, of heads and of the whole state."""
    hidden, size = config.hidden_size, config.head_dim
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    match config:
        case PhiConfig():
            return 2 * hidden + 4 * size * config.qk_layernorm
        case Gemma3Config():
            return 2 * hidden + 2 * size
        case Gemma2Config():
            return 2 * hidden
        case Qwen3Config() | Qwen3MoeConfig():
            return hidden + 2 * size
        case Glm4MoeConfig():
            return hidden + 2 * size * config.use_qk_norm
        case MiniMaxM2Config():
            return hidden + (heads + groups) * size
    return hidden


def _window(config: DecoderConfig, layer: int) -> int | None:
    """Tokens that the block sees, None: all of the past."""
    match config:
        case Gemma3Config():
            slides = bool((layer + 1) % config.sliding_window_pattern)
        case GptOssConfig():
            return config.window_of(layer)
        case Gemma2Config():
            slides = layer % 2 == 0
        case Qwen2Config():
            slides = config.use_sliding_window and layer >= config.max_window_layers
        case Qwen3MoeConfig():
            return config.window
        case SmolLM3Config():
            slides = config.use_sliding_window
        case MistralConfig() | Phi3Config():
            slides = True
        case _:
            return None
    types = getattr(config, "layer_types", ())
    return config.sliding_window if (types[layer] == _SLIDING if types else slides) else None


@attention_sizes.register
def _latent(config: MlaConfig, layer: int) -> AttentionSizes:
    """Latent attention (arXiv:2405.04434, section 2.1): one compressed vector and one rotated key for each token.

    Scores and sums are taken on the compressed vector itself; expanding queries and outputs costs what `kv_b` has.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    rank, rotated, biased = config.kv_lora_rank, config.qk_rope_head_dim, config.attention_bias
    query = config.qk_nope_head_dim + rotated
    down = (Matrix("kv_a_proj_with_mqa", rank + rotated, hidden, biased),
            Matrix("kv_b_proj", heads * (config.qk_nope_head_dim + config.v_head_dim), rank),
            Matrix("o_proj", hidden, heads * config.v_head_dim, biased))
    queries: tuple[Matrix, ...] = (Matrix("q_proj", heads * query, hidden),)
    numbers = config.q_lora_rank or 0
    if config.q_lora_rank is not None:
        queries = (Matrix("q_a_proj", config.q_lora_rank, hidden, biased),
                   Matrix("q_b_proj", heads * query, config.q_lora_rank))
    index, index_numbers, index_values = _indexer(config, layer)
    part = Part(f"model.layers.{layer}.self_attn", (*queries, *down, *index),
                numbers=hidden + rank + numbers + index_numbers)
    return AttentionSizes(part=part, cache=Cache(values=rank + rotated + index_values, heads=1 + bool(index_values)),
                          context_flops=2 * heads * (2 * rank + rotated) + 2 * index_values * bool(index),
                          width=hidden + heads * (query + 2 * rank + rotated))


def _indexer(config: MlaConfig, layer: int) -> tuple[tuple[Matrix, ...], int, int]:
    """DeepSeek-V3.2's and GLM-5's choice of keys: matrices, numbers, and what it keeps of each token."""
    if not isinstance(config, DeepseekV32Config | GlmMoeDsaConfig) or not _has_indexer(config, layer):
        return (), 0, 0
    assert config.q_lora_rank is not None, "the indexer's queries come from the compressed ones"
    size, heads = config.index_head_dim, config.index_n_heads
    return ((Matrix("indexer.wq_b", heads * size, config.q_lora_rank), Matrix("indexer.wk", size, config.hidden_size),
             Matrix("indexer.weights_proj", heads, config.hidden_size, plain=True)), 2 * size, size)


def _has_indexer(config: DeepseekV32Config | GlmMoeDsaConfig, layer: int) -> bool:
    if isinstance(config, DeepseekV32Config):
        return True
    if config.indexer_types:
        return config.indexer_types[layer] == "full"
    if config.index_topk_pattern is not None:
        return config.index_topk_pattern[layer] == "F"
    return max(layer - config.index_skip_topk_offset + 1, 0) % config.index_topk_freq == 0


@attention_sizes.register
def _linear(config: KimiLinearConfig, layer: int) -> AttentionSizes:
    """A recurrent layer (Kimi Delta Attention) or, in the listed ones, latent attention.  Layers count from 1 there."""
    if config.model_type == "kimi_k3":
        raise CheckpointError("the sizes of model type 'kimi_k3' are not known")
    linear = config.linear_attention
    if layer + 1 not in linear.kda_layers:
        return _latent(config, layer)
    hidden, size, inner = config.hidden_size, linear.head_dim, linear.num_heads * linear.head_dim
    projections = tuple(Matrix(name, inner, hidden) for name in ("q_proj", "k_proj", "v_proj"))
    gates = (Matrix("f_a_proj", size, hidden), Matrix("f_b_proj", inner, size),
             Matrix("b_proj", linear.num_heads, hidden), Matrix("g_a_proj", size, hidden),
             Matrix("g_b_proj", inner, size))
    part = Part(f"model.layers.{layer}.self_attn", (*projections, *gates, Matrix("o_proj", hidden, inner)),
                numbers=hidden + size + 3 * inner * linear.short_conv_kernel_size, exact=inner + linear.num_heads)
    state = inner * size + 3 * inner * (linear.short_conv_kernel_size - 1)
    return AttentionSizes(part=part, cache=Cache(state=state), context_flops=0, width=hidden + 5 * inner)
