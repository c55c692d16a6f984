"""GPT-OSS: attention sinks, alternating windows, clamped experts, YaRN."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from batchgen_beam.config.base import DecoderConfig, eos_field, too_many_chosen
from batchgen_beam.config.model_registry import register_config
from batchgen_beam.config.reading import json_field
from batchgen_beam.config.rope import PLAIN_KINDS, RopeParameters, rope_reader

__all__ = ["GptOssConfig"]

_ROPE = RopeParameters(rope_type="yarn", theta=150000.0, factor=32.0, original_max_position_embeddings=4096,
                       truncate=False)


@register_config("gpt_oss")
@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig(DecoderConfig):
    """`intermediate_size` is that of an expert; even layers slide unless `layer_types` says otherwise."""

    layer_kinds: ClassVar[tuple[str, ...]] = ("sliding_attention", "full_attention")

    architecture_names: ClassVar[tuple[str, ...]] = ("GptOssForCausalLM",)

    model_type: str = "gpt_oss"
    vocab_size: int = 201088
    hidden_size: int = 2880
    intermediate_size: int = 2880
    num_hidden_layers: int = 36
    num_attention_heads: int = 64
    num_key_value_heads: int = 8
    head_dim: int = 64
    max_position_embeddings: int = 131072
    eos_token_ids: tuple[int, ...] = eos_field()
    rms_norm_eps: float = json_field(1e-5, least=0.0)
    rope: RopeParameters = field(default=_ROPE, metadata=rope_reader(*PLAIN_KINDS))
    attention_bias: bool = True
    sliding_window: int | None = 128
    layer_types: tuple[str, ...] = ()
    num_local_experts: int = 128
    num_experts_per_tok: int = json_field(4, "num_experts_per_tok", "experts_per_token")
    swiglu_limit: float = json_field(7.0, least=0.0)
    swiglu_alpha: float = 1.702

    def window_of(self, layer: int) -> int | None:
        """How far a layer, counted from 0, sees in tokens; None: everything."""
        kind = self.layer_types[layer] if self.layer_types else self.layer_kinds[layer % 2]
        return self.sliding_window if kind == "sliding_attention" else None

    def unsupported(self) -> tuple[str, ...]:
        """Beside those of every decoder: other layers, and more experts than there are."""
        odd = sorted(set(self.layer_types) - set(self.layer_kinds))
        if self.layer_types and (odd or len(self.layer_types) != self.num_hidden_layers):
            odd = [f"layer_types {odd or f'of {len(self.layer_types)} layers'}"]
        return (DecoderConfig.unsupported(self) + tuple(odd)
                + too_many_chosen(self.num_experts_per_tok, self.num_local_experts))
