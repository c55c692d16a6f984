"""Kimi-Linear and the text part of Kimi-K3: recurrent layers with latent attention between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from batchgen_beam.config.base import eos_field
from batchgen_beam.config.families.deepseek import MlaConfig
from batchgen_beam.config.model_registry import register_config
from batchgen_beam.config.reading import JsonObject, json_field, read_fields

__all__ = ["KimiK3Config", "KimiLinearConfig", "LinearAttention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """The recurrent layers; `kda_layers` and `full_attn_layers` count layers from 1."""

    kda_layers: tuple[int, ...] = ()
    full_attn_layers: tuple[int, ...] = ()
    num_heads: int = 32
    head_dim: int = 128
    short_conv_kernel_size: int = 4


def _read_linear(source: JsonObject, default: LinearAttention) -> LinearAttention | None:
    child = source.child("linear_attn_config")
    return None if child is None else LinearAttention(**read_fields(LinearAttention, child))


@register_config("kimi_linear")
@dataclass(frozen=True, slots=True, kw_only=True)
class KimiLinearConfig(MlaConfig):
    """Latent attention without rotary positions in every fourth layer, a recurrent state in the others."""

    architecture_names: ClassVar[tuple[str, ...]] = ("KimiLinearForCausalLM",)

    model_type: str = "kimi_linear"
    vocab_size: int = 163840
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 27
    num_attention_heads: int = 32
    max_position_embeddings: int = json_field(1048576, "model_max_length", "max_position_embeddings")
    bos_token_id: int | None = 163584
    eos_token_ids: tuple[int, ...] = eos_field(163586)
    rms_norm_eps: float = json_field(1e-5, least=0.0)
    q_lora_rank: int | None = None
    n_routed_experts: int = json_field(256, "num_experts", "n_routed_experts")
    n_shared_experts: int = json_field(1, "num_shared_experts", "n_shared_experts", least=0)
    num_experts_per_tok: int | None = json_field(8, "num_experts_per_token", "num_experts_per_tok")
    moe_intermediate_size: int = 1024
    first_k_dense_replace: int = json_field(1, least=0)
    n_group: int | None = json_field(1, "num_expert_group", "n_group")
    topk_group: int | None = 1
    scoring_func: str = json_field("sigmoid", "moe_router_activation_func", "scoring_func")
    norm_topk_prob: bool = json_field(True, "moe_renormalize", "norm_topk_prob")
    routed_scaling_factor: float = json_field(2.446, least=0.0)
    mla_use_nope: bool = True
    linear_attention: LinearAttention = field(default=LinearAttention(), metadata={"reader": _read_linear})


@register_config("kimi_k3")
@dataclass(frozen=True, slots=True, kw_only=True)
class KimiK3Config(KimiLinearConfig):
    """Kimi-Linear's outline with more layers and experts; the nested text part calls itself `kimi_linear`."""

    architecture_names: ClassVar[tuple[str, ...]] = ()

    model_type: str = "kimi_k3"
    num_hidden_layers: int = 93
    n_routed_experts: int = json_field(896, "num_experts", "n_routed_experts")
    num_experts_per_tok: int | None = json_field(16, "num_experts_per_token", "num_experts_per_tok")
