"""Phi-1, 1.5 and 2 (`phi`), and Phi-3, 3.5 and 4 (`phi3`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from batchgen_beam.config.base import DecoderConfig, eos_field
from batchgen_beam.config.model_registry import register_config
from batchgen_beam.config.reading import json_field
from batchgen_beam.config.rope import PLAIN_KINDS, RopeParameters, rope_reader

__all__ = ["Phi3Config", "PhiConfig"]


@register_config("phi")
@dataclass(frozen=True, slots=True, kw_only=True)
class PhiConfig(DecoderConfig):
    """Attention and feed-forward part in parallel behind one LayerNorm (`layer_norm_eps`); biases everywhere."""

    architecture_names: ClassVar[tuple[str, ...]] = ("PhiForCausalLM",)
    activations: ClassVar[tuple[str, ...]] = ("gelu_new",)

    model_type: str = "phi"
    vocab_size: int = 51200
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_hidden_layers: int = 24
    num_attention_heads: int = 32
    hidden_act: str = "gelu_new"
    max_position_embeddings: int = 2048
    bos_token_id: int | None = 1
    eos_token_ids: tuple[int, ...] = eos_field(2)
    rope: RopeParameters = field(default=RopeParameters(partial_rotary_factor=0.5), metadata=rope_reader(*PLAIN_KINDS))
    layer_norm_eps: float = json_field(1e-5, least=0.0)
    qk_layernorm: bool = False


@register_config("phi3")
@dataclass(frozen=True, slots=True, kw_only=True)
class Phi3Config(DecoderConfig):
    """Fused q, k, v and fused gate and up; longrope switches factors at `original_max_position_embeddings`."""

    architecture_names: ClassVar[tuple[str, ...]] = ("Phi3ForCausalLM",)

    model_type: str = "phi3"
    vocab_size: int = 32064
    hidden_size: int = 3072
    intermediate_size: int = 8192
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    max_position_embeddings: int = 4096
    original_max_position_embeddings: int = 4096
    bos_token_id: int | None = 1
    eos_token_ids: tuple[int, ...] = eos_field(32000)
    rms_norm_eps: float = json_field(1e-5, least=0.0)
    rope: RopeParameters = field(default=RopeParameters(), metadata=rope_reader(*PLAIN_KINDS, "longrope"))
    sliding_window: int | None = None
