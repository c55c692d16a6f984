"""SmolLM3: Llama with layers that have no rotary positions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from batchgen_beam.config.base import DecoderConfig, eos_field
from batchgen_beam.config.model_registry import register_config
from batchgen_beam.config.rope import PLAIN_KINDS, RopeParameters, rope_reader

__all__ = ["SmolLM3Config"]


@register_config("smollm3")
@dataclass(frozen=True, slots=True, kw_only=True)
class SmolLM3Config(DecoderConfig):
    """`no_rope_layers` holds 1 for a layer with rotary positions and 0 for one without; empty means that every
    `no_rope_layer_interval`-th has none."""

    architecture_names: ClassVar[tuple[str, ...]] = ("SmolLM3ForCausalLM",)

    model_type: str = "smollm3"
    vocab_size: int = 128256
    hidden_size: int = 2048
    intermediate_size: int = 11008
    num_hidden_layers: int = 36
    num_attention_heads: int = 16
    num_key_value_heads: int = 4
    max_position_embeddings: int = 32768
    bos_token_id: int | None = 128000
    eos_token_ids: tuple[int, ...] = eos_field(128001)
    tie_word_embeddings: bool = True
    rope: RopeParameters = field(default=RopeParameters(theta=2e6), metadata=rope_reader(*PLAIN_KINDS))
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None
    no_rope_layers: tuple[int, ...] = ()
    no_rope_layer_interval: int = 4
