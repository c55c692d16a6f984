"""Llama 2 and 3.x, SmolLM2, TinyLlama, R1-Distill-Llama (`llama`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from batchgen_beam.config.base import DecoderConfig, eos_field
from batchgen_beam.config.model_registry import register_config
from batchgen_beam.errors import CheckpointError

__all__ = ["LlamaConfig"]


@register_config("llama")
@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Rotary on the whole head; rope kinds default, linear, dynamic, llama3, yarn."""

    architecture_names: ClassVar[tuple[str, ...]] = ("LlamaForCausalLM", "LLaMAForCausalLM")

    model_type: str = "llama"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    max_position_embeddings: int = 2048
    bos_token_id: int | None = 1
    eos_token_ids: tuple[int, ...] = eos_field(2)
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        DecoderConfig.__post_init__(self)
        if self.rope.partial_rotary_factor != 1.0:
            raise CheckpointError(f"partial_rotary_factor {self.rope.partial_rotary_factor} is not supported for llama")
        if self.head_dim % 2:
            raise CheckpointError(f"rotary positions need an even head_dim, got {self.head_dim}")
