"""GLM-4.5, 4.6 (`glm4_moe`) and GLM-5.x (`glm_moe_dsa`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from batchgen_beam.config.base import DecoderConfig, eos_field
from batchgen_beam.config.families.deepseek import MlaConfig
from batchgen_beam.config.model_registry import register_config
from batchgen_beam.config.reading import json_field
from batchgen_beam.config.rope import PLAIN_KINDS, RopeParameters, rope_reader

__all__ = ["Glm4MoeConfig", "GlmMoeDsaConfig"]


@register_config("glm4_moe")
@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4MoeConfig(DecoderConfig):
    """Grouped-query attention with half of a head rotated, and DeepSeek-V3's router."""

    architecture_names: ClassVar[tuple[str, ...]] = ("Glm4MoeForCausalLM",)

    model_type: str = "glm4_moe"
    vocab_size: int = 151552
    hidden_size: int = 4096
    intermediate_size: int = 10944
    num_hidden_layers: int = 46
    num_attention_heads: int = 96
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 131072
    rms_norm_eps: float = json_field(1e-5, least=0.0)
    rope: RopeParameters = field(default=RopeParameters(partial_rotary_factor=0.5), metadata=rope_reader(*PLAIN_KINDS))
    use_qk_norm: bool = False
    moe_intermediate_size: int = 1408
    n_routed_experts: int = 128
    n_shared_experts: int = json_field(1, least=0)
    num_experts_per_tok: int = 8
    first_k_dense_replace: int = json_field(1, least=0)
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = json_field(1.0, least=0.0)
    num_nextn_predict_layers: int = json_field(1, least=0)

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        return layer >= self.first_k_dense_replace


@register_config("glm_moe_dsa")
@dataclass(frozen=True, slots=True, kw_only=True)
class GlmMoeDsaConfig(MlaConfig):
    """GLM-5: latent attention with an indexer.  Which layers run it: `indexer_types`, else `index_topk_pattern` (F
    full, S shared), else those i with max(i - index_skip_topk_offset + 1, 0) divisible by `index_topk_freq`."""

    architecture_names: ClassVar[tuple[str, ...]] = ("GlmMoeDsaForCausalLM",)

    model_type: str = "glm_moe_dsa"
    vocab_size: int = 154880
    hidden_size: int = 6144
    intermediate_size: int = 12288
    num_hidden_layers: int = 78
    num_attention_heads: int = 64
    max_position_embeddings: int = 202752
    bos_token_id: int | None = 0
    eos_token_ids: tuple[int, ...] = eos_field(1)
    rms_norm_eps: float = json_field(1e-5, least=0.0)
    q_lora_rank: int | None = 2048
    qk_nope_head_dim: int = 192
    v_head_dim: int = 256
    n_routed_experts: int = 256
    n_group: int | None = 1
    topk_group: int | None = 1
    index_topk: int = 2048
    index_head_dim: int = 128
    index_n_heads: int = 32
    indexer_types: tuple[str, ...] = ()
    index_topk_freq: int = 1
    index_skip_topk_offset: int = json_field(2, least=0)
    index_topk_pattern: str | None = None
    indexer_rope_interleave: bool = True
