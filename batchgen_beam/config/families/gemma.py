"""Gemma-2 and the text part of Gemma-3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from batchgen_beam.config.base import DecoderConfig, eos_field
from batchgen_beam.config.model_registry import register_config
from batchgen_beam.config.reading import JsonObject, json_field
from batchgen_beam.config.rope import PLAIN_KINDS, RopeParameters, parse_rope, read_rope
from batchgen_beam.errors import CheckpointError

__all__ = ["Gemma2Config", "Gemma3Config"]


def _read_activation(source: JsonObject, default: str) -> str | None:
    """`hidden_activation` beats `hidden_act`."""
    found: str | None = source.read("hidden_activation", str) or source.read("hidden_act", str)
    return found


@register_config("gemma2")
@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma2Config(DecoderConfig):
    """Soft caps on attention and final logits (null: off); even layers slide unless `layer_types` says otherwise."""

    architecture_names: ClassVar[tuple[str, ...]] = ("Gemma2ForCausalLM",)
    activations: ClassVar[tuple[str, ...]] = ("gelu_pytorch_tanh",)

    model_type: str = "gemma2"
    vocab_size: int = 256000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    hidden_act: str = json_field("gelu_pytorch_tanh", reader=_read_activation)
    max_position_embeddings: int = 8192
    bos_token_id: int | None = 2
    eos_token_ids: tuple[int, ...] = eos_field(1)
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: float = json_field(256.0, least=0.0)
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] = ()
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    use_bidirectional_attention: bool = False

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)
        if self.use_bidirectional_attention:
            raise CheckpointError("use_bidirectional_attention marks an embedding model, which can't generate")


def _by_layer_type(source: JsonObject, layer_type: str, default: RopeParameters) -> RopeParameters | None:
    """The rope of one layer type where `rope_parameters` is nested by them."""
    both = source.child("rope_parameters")
    rope = None if both is None else both.child(layer_type)
    if rope is None:
        return None
    lengths = {key: value for key, value in source.values.items() if key == "max_position_embeddings"}
    return parse_rope(JsonObject(lengths, source.where), rope, default, PLAIN_KINDS)


def _read_global(source: JsonObject, default: RopeParameters) -> RopeParameters:
    return _by_layer_type(source, "full_attention", default) or read_rope(source, default, PLAIN_KINDS)


def _read_local(source: JsonObject, default: RopeParameters) -> RopeParameters | None:
    nested = _by_layer_type(source, "sliding_attention", default)
    theta = source.read("rope_local_base_freq", float)
    return RopeParameters(theta=theta) if nested is None and theta is not None else nested


_GLOBAL_ROPE: Mapping[str, Any] = {"reader": _read_global}
_LOCAL_ROPE: Mapping[str, Any] = {"reader": _read_local}


@register_config("gemma3")
@register_config("gemma3_text")
@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(Gemma2Config):
    """`rope` is that of the global layers, `local_rope` of the sliding ones; every `sliding_window_pattern`-th layer is
    global unless `layer_types` says otherwise."""

    architecture_names: ClassVar[tuple[str, ...]] = ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration")

    model_type: str = "gemma3_text"
    vocab_size: int = 262208
    max_position_embeddings: int = 131072
    rope: RopeParameters = field(default=RopeParameters(theta=1e6), metadata=_GLOBAL_ROPE)
    local_rope: RopeParameters = field(default=RopeParameters(), metadata=_LOCAL_ROPE)
    sliding_window_pattern: int = 6
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
