"""The tables of tensors of sparse families: Mixtral, Qwen3-MoE, DeepSeek-V2 and V3, Kimi-K2 and K2.5, GPT-OSS.

A row is the tensor's name within its layer, the parameter's name, and its shape in letters.  Experts come one tensor
each, as published; or all in one tensor, `[E, 2 M, D]` with gate before up, as some tools write them again; or
(GPT-OSS) `[E, D, 2 M]` with gate and up in turn.  Does not know files, dtypes or the matching of names.

Shape letters: V vocabulary, D hidden size, H query heads, h head size, Q = H * h, K key/value heads * h,
I intermediate, E experts, M an expert's intermediate, S that of the shared expert; of latent attention: q query rank,
c latent size, e = c + rotated, A = H * (plain + rotated), B = H * (plain + value), O = H * value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from batchgen_beam.config.base import DecoderConfig
from batchgen_beam.config.families.deepseek import MlaConfig
from batchgen_beam.config.families.gpt_oss import GptOssConfig
from batchgen_beam.config.families.mistral import MixtralConfig
from batchgen_beam.config.families.qwen import Qwen3MoeConfig
from batchgen_beam.weights.parameter import Cut, Parameter

__all__ = ["SparseConfig", "sparse_parameters"]

SparseConfig = MixtralConfig | Qwen3MoeConfig | MlaConfig | GptOssConfig

Row = tuple[str, str, str]

_NORMS: tuple[Row, ...] = (
    ("input_layernorm.weight", "attention_norm", "D"),
    ("post_attention_layernorm.weight", "feed_forward_norm", "D"),
)
_GROUPED: tuple[Row, ...] = (
    ("self_attn.q_proj.weight", "attention.q", "QD"),
    ("self_attn.k_proj.weight", "attention.k", "KD"),
    ("self_attn.v_proj.weight", "attention.v", "KD"),
    ("self_attn.o_proj.weight", "attention.o", "DQ"),
)
_GROUPED_BIASES: tuple[Row, ...] = (
    ("self_attn.q_proj.bias", "attention.q.bias", "Q"),
    ("self_attn.k_proj.bias", "attention.k.bias", "K"),
    ("self_attn.v_proj.bias", "attention.v.bias", "K"),
    ("self_attn.o_proj.bias", "attention.o.bias", "D"),
)
_HEAD_NORMS: tuple[Row, ...] = (
    ("self_attn.q_norm.weight", "attention.q_norm", "h"),
    ("self_attn.k_norm.weight", "attention.k_norm", "h"),
)
_SINKS: tuple[Row, ...] = (("self_attn.sinks", "attention.sinks", "H"),)
_LATENT: tuple[Row, ...] = (
    ("self_attn.kv_a_proj_with_mqa.weight", "attention.kv_a", "eD"),
    ("self_attn.kv_a_layernorm.weight", "attention.kv_norm", "c"),
    ("self_attn.kv_b_proj.weight", "attention.kv_b", "Bc"),
    ("self_attn.o_proj.weight", "attention.o", "DO"),
)
_LATENT_BIASES: tuple[Row, ...] = (
    ("self_attn.kv_a_proj_with_mqa.bias", "attention.kv_a.bias", "e"),
    ("self_attn.o_proj.bias", "attention.o.bias", "D"),
)
_QUERY: tuple[Row, ...] = (("self_attn.q_proj.weight", "attention.q", "AD"),)
_LOW_RANK_QUERY: tuple[Row, ...] = (
    ("self_attn.q_a_proj.weight", "attention.q_a", "qD"),
    ("self_attn.q_a_layernorm.weight", "attention.q_norm", "q"),
    ("self_attn.q_b_proj.weight", "attention.q_b", "Aq"),
)
_LOW_RANK_QUERY_BIAS: tuple[Row, ...] = (("self_attn.q_a_proj.bias", "attention.q_a.bias", "q"),)
_DENSE: tuple[Row, ...] = (
    ("mlp.gate_proj.weight", "feed_forward.gate", "ID"),
    ("mlp.up_proj.weight", "feed_forward.up", "ID"),
    ("mlp.down_proj.weight", "feed_forward.down", "DI"),
)
_ROUTER: tuple[Row, ...] = (("mlp.gate.weight", "router", "ED"),)
_MIXTRAL_ROUTER: tuple[Row, ...] = (("block_sparse_moe.gate.weight", "router", "ED"),)
_CORRECTION: tuple[Row, ...] = (("mlp.gate.e_score_correction_bias", "router.correction", "E"),)
_BIASED_ROUTER: tuple[Row, ...] = (("mlp.router.weight", "router", "ED"), ("mlp.router.bias", "router.bias", "E"))
_SHARED: tuple[Row, ...] = (
    ("mlp.shared_experts.gate_proj.weight", "shared.gate", "SD"),
    ("mlp.shared_experts.up_proj.weight", "shared.up", "SD"),
    ("mlp.shared_experts.down_proj.weight", "shared.down", "DS"),
)
_EXPERT: tuple[Row, ...] = (
    ("mlp.experts.{e}.gate_proj.weight", "experts.{e}.gate", "MD"),
    ("mlp.experts.{e}.up_proj.weight", "experts.{e}.up", "MD"),
    ("mlp.experts.{e}.down_proj.weight", "experts.{e}.down", "DM"),
)
_MIXTRAL_EXPERT: tuple[Row, ...] = (
    ("block_sparse_moe.experts.{e}.w1.weight", "experts.{e}.gate", "MD"),
    ("block_sparse_moe.experts.{e}.w3.weight", "experts.{e}.up", "MD"),
    ("block_sparse_moe.experts.{e}.w2.weight", "experts.{e}.down", "DM"),
)

_EXACT = ("attention.sinks", "router", "router.bias", "router.correction")

_FUSED_GATE_UP, _FUSED_DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def sparse_parameters(config: SparseConfig, stored: Collection[str]) -> tuple[Parameter, ...]:
    """Every parameter of the model, layer by layer; `stored` names decide how the experts are laid out."""
    sizes = _sizes(config)
    fused = any(name.endswith(f".{_FUSED_GATE_UP}") for name in stored)
    found = [Parameter(name="embedding", stored="model.embed_tokens.weight", shape=_shape("VD", sizes))]
    for i in range(config.num_hidden_layers):
        found += _layer(config, i, sizes, fused)
    found.append(Parameter(name="norm", stored="model.norm.weight", shape=_shape("D", sizes)))
    if not config.tie_word_embeddings:
        found.append(Parameter(name="head", stored="lm_head.weight", shape=_shape("VD", sizes)))
    return tuple(found)


def _layer(config: SparseConfig, layer: int, sizes: Mapping[str, int], fused: bool) -> Iterator[Parameter]:
    stored, name = f"model.layers.{layer}.", f"layers.{layer}."
    sparse = not isinstance(config, Qwen3MoeConfig | MlaConfig) or config.is_sparse(layer)
    for row, parameter, letters in _NORMS + _attention(config) + (_router(config, fused) if sparse else _DENSE):
        yield Parameter(name=name + parameter, stored=stored + row, shape=_shape(letters, sizes),
                        exact=parameter in _EXACT)
    for e in range(sizes["E"] if sparse else 0):
        if isinstance(config, GptOssConfig):
            yield from _fused_expert(stored, name, e, sizes, inputs_first=True)
        elif fused:
            yield from _fused_expert(stored, name, e, sizes, inputs_first=False)
        else:
            for row, parameter, letters in _MIXTRAL_EXPERT if isinstance(config, MixtralConfig) else _EXPERT:
                yield Parameter(name=name + parameter.format(e=e), stored=stored + row.format(e=e),
                                shape=_shape(letters, sizes))


def _attention(config: SparseConfig) -> tuple[Row, ...]:
    biased = config.attention_bias
    if isinstance(config, MlaConfig):
        rows = _LATENT + (_LATENT_BIASES if biased else ())
        if config.q_lora_rank is None:
            return _QUERY + rows
        return _LOW_RANK_QUERY + (_LOW_RANK_QUERY_BIAS if biased else ()) + rows
    more = _HEAD_NORMS if isinstance(config, Qwen3MoeConfig) else _SINKS if isinstance(config, GptOssConfig) else ()
    return _GROUPED + (_GROUPED_BIASES if biased else ()) + more


def _router(config: SparseConfig, fused: bool) -> tuple[Row, ...]:
    """The parts of a sparse layer that are not experts of the choice."""
    if isinstance(config, GptOssConfig):
        return _BIASED_ROUTER
    if isinstance(config, MlaConfig):
        return (_ROUTER + (_CORRECTION if config.has_correction else ())
                + (_SHARED if config.n_shared_experts else ()))
    return _MIXTRAL_ROUTER if isinstance(config, MixtralConfig) and not fused else _ROUTER


def _fused_expert(stored: str, name: str, expert: int, sizes: Mapping[str, int], *,
                  inputs_first: bool) -> Iterator[Parameter]:
    """One expert out of tensors that hold all; with inputs first there are biases too."""
    experts, inner, hidden = sizes["E"], sizes["M"], sizes["D"]
    gate, up = ((slice(0, None, 2), slice(1, None, 2)) if inputs_first else (slice(0, inner), slice(inner, 2 * inner)))
    for part, row, outputs, taken, inputs in (
            ("gate", _FUSED_GATE_UP, 2 * inner, gate, hidden), ("up", _FUSED_GATE_UP, 2 * inner, up, hidden),
            ("down", _FUSED_DOWN, hidden, slice(None), inner)):
        cut = Cut(expert=expert, outputs=taken, inputs_first=inputs_first)
        count = len(range(outputs)[taken])
        whole = (inputs, outputs) if inputs_first else (outputs, inputs)
        parameter = f"{name}experts.{expert}.{part}"
        yield Parameter(name=parameter, stored=stored + row, shape=(count, inputs), cut=cut,
                        stored_shape=(experts, *whole))
        if inputs_first:
            yield Parameter(name=f"{parameter}.bias", stored=f"{stored}{row}_bias", shape=(count,), cut=cut,
                            stored_shape=(experts, outputs))


def _shape(letters: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(sizes[letter] for letter in letters)


def _sizes(config: SparseConfig) -> Mapping[str, int]:
    heads = config.num_attention_heads
    common = {"V": config.vocab_size, "D": config.hidden_size, "I": config.intermediate_size, "H": heads}
    if isinstance(config, MlaConfig):
        latent, plain, rotated = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
        return common | {
            "q": config.q_lora_rank or 0, "c": latent, "e": latent + rotated, "A": heads * (plain + rotated),
            "B": heads * (plain + config.v_head_dim), "O": heads * config.v_head_dim, "E": config.n_routed_experts,
            "M": config.moe_intermediate_size, "S": config.moe_intermediate_size * config.n_shared_experts}
    return {**common, **_grouped_sizes(config)} | (
        {"E": config.num_experts, "M": config.moe_intermediate_size} if isinstance(config, Qwen3MoeConfig)
        else {"E": config.num_local_experts, "M": config.intermediate_size})


def _grouped_sizes(config: DecoderConfig) -> Mapping[str, int]:
    size = config.head_dim
    return {"h": size, "Q": config.num_attention_heads * size, "K": config.num_key_value_heads * size}
