"""DeepSeek-V2, V3, R1, V3.2, and Kimi-K2 and K2.5, which are DeepSeek-V3 code: latent attention and routed experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from batchgen_beam.config.base import DERIVED, DecoderConfig, eos_field, too_many_chosen
from batchgen_beam.config.model_registry import register_config
from batchgen_beam.config.reading import json_field

__all__ = ["DeepseekV2Config", "DeepseekV3Config", "DeepseekV32Config", "KimiK2Config", "KimiK25Config", "MlaConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MlaConfig(DecoderConfig):
    """Multi-head latent attention (arXiv:2405.04434, section 2.1) and routed experts.

    `head_dim` is always the rotated part, `qk_rope_head_dim`, whatever the file says.  `q_lora_rank` None means a plain
    q projection.  The first `first_k_dense_replace` layers are dense; `num_nextn_predict_layers` beyond the last layer
    predict further tokens and are not used.
    """

    scoring: ClassVar[str] = "sigmoid"
    topk_methods: ClassVar[tuple[str, ...]] = ("noaux_tc",)

    head_dim: int = json_field(DERIVED, reader=lambda source, default: None)
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    n_routed_experts: int
    n_shared_experts: int = json_field(1, least=0)
    num_experts_per_tok: int | None = 8
    moe_intermediate_size: int = 2048
    first_k_dense_replace: int = json_field(3, least=0)
    moe_layer_freq: int = 1
    n_group: int | None = 8
    topk_group: int | None = 4
    topk_method: str = "noaux_tc"
    scoring_func: str = "sigmoid"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = json_field(2.5, least=0.0)
    num_nextn_predict_layers: int = json_field(0, least=0)
    rope_interleave: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_dim", self.qk_rope_head_dim)
        DecoderConfig.__post_init__(self)

    @property
    def has_correction(self) -> bool:
        """Whether the router chooses by score plus a bias."""
        return self.scoring == "sigmoid"

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def unsupported(self) -> tuple[str, ...]:
        """Beside those of every decoder: other routers, and rotation of half-split pairs."""
        groups, chosen_groups = self.n_group or 1, self.topk_group or 1
        wrong = {
            f"moe_layer_freq {self.moe_layer_freq}": self.moe_layer_freq != 1,
            f"scoring_func {self.scoring_func!r}": self.scoring_func != self.scoring,
            f"topk_method {self.topk_method!r}": self.topk_method not in self.topk_methods,
            f"norm_topk_prob true with scoring_func {self.scoring!r}":
                self.norm_topk_prob and self.scoring == "softmax",
            f"n_group {groups} with topk_group {chosen_groups} of {self.n_routed_experts} experts":
                bool(self.n_routed_experts % groups) or chosen_groups > groups,
            "rope_interleave false": not self.rope_interleave,
        }
        return (DecoderConfig.unsupported(self) + tuple(name for name, is_wrong in wrong.items() if is_wrong)
                + too_many_chosen(self.num_experts_per_tok, self.n_routed_experts))


@register_config("deepseek_v2")
@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV2Config(MlaConfig):
    """Softmax router; a group's score is its best expert."""

    architecture_names: ClassVar[tuple[str, ...]] = ("DeepseekV2ForCausalLM",)
    scoring: ClassVar[str] = "softmax"
    topk_methods: ClassVar[tuple[str, ...]] = ("greedy", "group_limited_greedy")

    model_type: str = "deepseek_v2"
    vocab_size: int = 102400
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    max_position_embeddings: int = 2048
    bos_token_id: int | None = 1
    eos_token_ids: tuple[int, ...] = eos_field(2)
    n_routed_experts: int = 64
    n_shared_experts: int = json_field(2, least=0)
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int = 1407
    first_k_dense_replace: int = json_field(0, least=0)
    n_group: int | None = None
    topk_group: int | None = None
    topk_method: str = "greedy"
    scoring_func: str = "softmax"
    norm_topk_prob: bool = False
    routed_scaling_factor: float = json_field(1.0, least=0.0)


@register_config("deepseek_v3")
@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV3Config(MlaConfig):
    """Sigmoid router that chooses by score plus a correction bias (arXiv:2412.19437, section 2.1.2)."""

    architecture_names: ClassVar[tuple[str, ...]] = ("DeepseekV3ForCausalLM",)

    model_type: str = "deepseek_v3"
    vocab_size: int = 129280
    hidden_size: int = 7168
    intermediate_size: int = 18432
    num_hidden_layers: int = 61
    num_attention_heads: int = 128
    max_position_embeddings: int = 4096
    bos_token_id: int | None = 0
    eos_token_ids: tuple[int, ...] = eos_field(1)
    n_routed_experts: int = 256
    num_nextn_predict_layers: int = json_field(1, least=0)


@register_config("deepseek_v32")
@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV32Config(DeepseekV3Config):
    """V3 with an indexer that keeps the best `index_topk` keys of each query."""

    architecture_names: ClassVar[tuple[str, ...]] = ("DeepseekV32ForCausalLM",)

    model_type: str = "deepseek_v32"
    max_position_embeddings: int = 163840
    index_topk: int = 2048
    index_head_dim: int = 128
    index_n_heads: int = 64


@register_config("kimi_k2")
@dataclass(frozen=True, slots=True, kw_only=True)
class KimiK2Config(DeepseekV3Config):
    """DeepSeek-V3 under another type name; its facts come from config.json."""

    architecture_names: ClassVar[tuple[str, ...]] = ()

    model_type: str = "kimi_k2"


@register_config("kimi_k25")
@dataclass(frozen=True, slots=True, kw_only=True)
class KimiK25Config(DeepseekV3Config):
    """The text part of Kimi-K2.5 and K2.6; config.json nests it and sets `tie_word_embeddings` outside."""

    architecture_names: ClassVar[tuple[str, ...]] = (
        "KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration")

    model_type: str = "kimi_k25"
    tie_word_embeddings: bool = True
