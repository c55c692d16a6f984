"""Mistral (also the text part of Mistral-Small-3.x) and Mixtral."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from batchgen_beam.config.base import DecoderConfig, eos_field, too_many_chosen
from batchgen_beam.config.model_registry import register_config
from batchgen_beam.config.reading import json_field
from batchgen_beam.config.rope import PLAIN_KINDS, RopeParameters, rope_reader

__all__ = ["MistralConfig", "MixtralConfig"]


@register_config("mistral3")
@register_config("mistral")
@dataclass(frozen=True, slots=True, kw_only=True)
class MistralConfig(DecoderConfig):
    """Key j is visible to query i iff 0 <= i - j < `sliding_window`; None means all earlier keys."""

    architecture_names: ClassVar[tuple[str, ...]] = ("MistralForCausalLM",)

    model_type: str = "mistral"
    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 14336
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131072
    bos_token_id: int | None = 1
    eos_token_ids: tuple[int, ...] = eos_field(2)
    sliding_window: int | None = 4096


@register_config("mixtral")
@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(MistralConfig):
    """Mistral with experts: softmax over all of them, the best `num_experts_per_tok` renormalised.

    `intermediate_size` is an expert's.
    """

    architecture_names: ClassVar[tuple[str, ...]] = ("MixtralForCausalLM",)

    model_type: str = "mixtral"
    rms_norm_eps: float = json_field(1e-5, least=0.0)
    rope: RopeParameters = field(default=RopeParameters(theta=1e6), metadata=rope_reader(*PLAIN_KINDS))
    sliding_window: int | None = None
    num_local_experts: int = 8
    num_experts_per_tok: int = 2

    def unsupported(self) -> tuple[str, ...]:
        """Beside those of every decoder: more experts than there are."""
        return DecoderConfig.unsupported(self) + too_many_chosen(self.num_experts_per_tok, self.num_local_experts)
