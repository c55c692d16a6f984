"""MiniMax-M2, M2.1 and M2.5."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from batchgen_beam.config.base import DecoderConfig, eos_field
from batchgen_beam.config.model_registry import register_config
from batchgen_beam.config.reading import json_field
from batchgen_beam.config.rope import PLAIN_KINDS, RopeParameters, rope_reader

__all__ = ["MiniMaxM2Config"]


@register_config("minimax_m2")
@dataclass(frozen=True, slots=True, kw_only=True)
class MiniMaxM2Config(DecoderConfig):
    """q and k normed over all heads at once; rotary on the first `rotary_dim` of a head (None: by the rope's part);
    sigmoid router with a correction bias; `intermediate_size` is that of an expert."""

    architecture_names: ClassVar[tuple[str, ...]] = ("MiniMaxM2ForCausalLM",)

    model_type: str = "minimax_m2"
    vocab_size: int = 200064
    hidden_size: int = 3072
    intermediate_size: int = 1536
    num_hidden_layers: int = 62
    num_attention_heads: int = 48
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 196608
    bos_token_id: int | None = 200034
    eos_token_ids: tuple[int, ...] = eos_field(200020)
    rope: RopeParameters = field(default=RopeParameters(theta=5e6), metadata=rope_reader(*PLAIN_KINDS))
    rotary_dim: int | None = None
    num_local_experts: int = 256
    num_experts_per_tok: int = 8
    scoring_func: str = "sigmoid"
    use_routing_bias: bool = True
    qk_norm_type: str = "per_layer"
    attn_type_list: tuple[int, ...] = ()
    num_mtp_modules: int = json_field(0, least=0)
