"""Qwen2, Qwen2.5, QwQ, Qwen3 and their mixture-of-experts models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from batchgen_beam.config.base import DecoderConfig, too_many_chosen
from batchgen_beam.config.model_registry import register_config
from batchgen_beam.config.reading import json_field

__all__ = ["Qwen2Config", "Qwen2MoeConfig", "Qwen3Config", "Qwen3MoeConfig"]


@register_config("qwen2")
@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2Config(DecoderConfig):
    """Bias on q, k and v only.  `sliding_window` counts only where `use_sliding_window` is true."""

    architecture_names: ClassVar[tuple[str, ...]] = ("Qwen2ForCausalLM",)

    model_type: str = "qwen2"
    vocab_size: int = 151936
    hidden_size: int = 4096
    intermediate_size: int = 22016
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int = json_field(28, least=0)
    layer_types: tuple[str, ...] = ()


class _SparseSteps:
    """Layers whose number (from 1) is a multiple of `decoder_sparse_step` have experts, unless in `mlp_only_layers`."""

    __slots__ = ()
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...]

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


@register_config("qwen2_moe")
@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2MoeConfig(Qwen2Config, _SparseSteps):
    """Softmax over all experts without renormalising, and a shared expert behind a sigmoid gate."""

    architecture_names: ClassVar[tuple[str, ...]] = ("Qwen2MoeForCausalLM",)

    model_type: str = "qwen2_moe"
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    moe_intermediate_size: int = 1408
    shared_expert_intermediate_size: int = json_field(5632, least=0)
    num_experts: int = json_field(60, "num_experts", "num_local_experts")
    num_experts_per_tok: int = 4
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()


@register_config("qwen3")
@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    """RMSNorm per head on q and k before the rotation; an explicit head size."""

    architecture_names: ClassVar[tuple[str, ...]] = ("Qwen3ForCausalLM",)

    model_type: str = "qwen3"
    head_dim: int = 128


@register_config("qwen3_moe")
@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3MoeConfig(DecoderConfig, _SparseSteps):
    """Softmax over all experts, renormalised where `norm_topk_prob` is true; heads as in Qwen3."""

    architecture_names: ClassVar[tuple[str, ...]] = ("Qwen3MoeForCausalLM",)

    model_type: str = "qwen3_moe"
    vocab_size: int = 151936
    hidden_size: int = 2048
    intermediate_size: int = 6144
    num_hidden_layers: int = 24
    num_attention_heads: int = 32
    num_key_value_heads: int = 4
    max_position_embeddings: int = 32768
    use_sliding_window: bool = False
    sliding_window: int | None = None
    moe_intermediate_size: int = 768
    num_experts: int = json_field(128, "num_experts", "num_local_experts")
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    @property
    def window(self) -> int | None:
        """How far every layer sees, in tokens; None: everything."""
        return self.sliding_window if self.use_sliding_window else None

    def unsupported(self) -> tuple[str, ...]:
        """Beside those of every decoder: more experts than there are."""
        return DecoderConfig.unsupported(self) + too_many_chosen(self.num_experts_per_tok, self.num_experts)
