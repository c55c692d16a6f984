"""Tiny random checkpoints of sparse families made with transformers, and what transformers answers on them.

Sizes are chosen so that every mechanism shows: windows of 8 tokens, YaRN with a ramp inside 16 rotated values, several
groups of experts, an epsilon of 1e-2 where some norms have their own.  The reference is a full forward pass without
cache, eager attention, float32.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 320
NEW_TOKENS = 12
LEAST_MARGIN = 0.004
"""Best minus second logit at every greedy step: 40 times the tolerance, so that equal tokens are no luck."""

COMMON = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1,
          "eos_token_id": 2, "pad_token_id": None, "tie_word_embeddings": False}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 2.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 64}
LATENT = {**COMMON, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16,
          "qk_rope_head_dim": 16, "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3,
          "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
          "rms_norm_eps": 1e-2}


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """One checkpoint: classes, keys, and what config.json says otherwise than transformers writes it."""

    config: type
    model: type
    keys: Mapping[str, Any]
    said: Mapping[str, Any] = field(default_factory=dict)


TINIES = {
    "mixtral": Tiny(config=MixtralConfig, model=MixtralForCausalLM, keys={
        **COMMON, "intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}),
    "mixtral, window": Tiny(config=MixtralConfig, model=MixtralForCausalLM, keys={
        **COMMON, "intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 8}),
    "qwen3_moe": Tiny(config=Qwen3MoeConfig, model=Qwen3MoeForCausalLM, keys={
        **COMMON, "head_dim": 24, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "norm_topk_prob": True, "decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3]}),
    "deepseek_v2": Tiny(config=DeepseekV2Config, model=DeepseekV2ForCausalLM, keys={
        **LATENT, "n_shared_experts": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0,
        "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5}}),
    "deepseek_v2_lite": Tiny(config=DeepseekV2Config, model=DeepseekV2ForCausalLM, keys={
        **LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "topk_method": "greedy",
        "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}),
    "deepseek_v3": Tiny(config=DeepseekV3Config, model=DeepseekV3ForCausalLM, keys={
        **LATENT, "n_shared_experts": 1, "num_nextn_predict_layers": 1,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "kimi_k2": Tiny(config=DeepseekV3Config, model=DeepseekV3ForCausalLM, said={"model_type": "kimi_k2"}, keys={
        **LATENT, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {**YARN, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "gpt_oss": Tiny(config=GptOssConfig, model=GptOssForCausalLM, keys={
        **COMMON, "head_dim": 16, "num_hidden_layers": 4, "intermediate_size": 64, "num_local_experts": 8,
        "num_experts_per_tok": 3, "sliding_window": 8, "swiglu_limit": 2.0,
        "rope_parameters": {**YARN, "truncate": False}}),
}


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A saved checkpoint, prompts, and for each prompt the logits of all its tokens and its greedy continuation."""

    folder: Path
    prompts: tuple[tuple[int, ...], ...]
    logits: tuple[Tensor, ...]
    greedy: tuple[tuple[int, ...], ...]


def make_reference(tiny: Tiny, folder: Path) -> Reference:
    """Save the first of some seeded checkpoints whose greedy choices are all clear."""
    prompts = tuple(tuple((7 * i * i + 3 * i + 11 * n) % VOCABULARY for i in range(n)) for n in (3, 15, 63))
    for seed in range(100):
        model = random_model(tiny, seed)
        runs = [_greedy(model, prompt) for prompt in prompts]
        if min(margin for _, margin in runs) >= LEAST_MARGIN:
            break
    else:
        raise AssertionError("no seed of 100 has clear greedy choices")
    model.save_pretrained(folder, max_shard_size="100KB")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **tiny.said}))
    return Reference(folder=folder, prompts=prompts, logits=tuple(_logits(model, p) for p in prompts),
                     greedy=tuple(ids for ids, _ in runs))


def random_model(tiny: Tiny, seed: int) -> Any:
    """Every parameter from a generator of its own, by name."""
    torch.manual_seed(seed)
    model = tiny.model(tiny.config(**tiny.keys, attn_implementation="eager")).eval()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in name:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
            tensor.data.copy_(torch.randn(tensor.shape, generator=generator) * _deviation(name, tensor)
                              + ("norm" in name and tensor.ndim == 1))
    return model


def _deviation(name: str, tensor: Tensor) -> float:
    if name.endswith("sinks") or "embed_tokens" in name:
        return 1.0
    if tensor.ndim == 1 or name.endswith("bias"):
        return 0.2
    inputs = tensor.shape[1] if tensor.ndim == 3 and tensor.shape[1] != 2 * tensor.shape[2] else tensor.shape[-1]
    return (2.5 if "lm_head" in name else 1.5) * float(inputs) ** -0.5


@torch.no_grad()
def _logits(model: Any, ids: tuple[int, ...]) -> Tensor:
    found: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return found


def _greedy(model: Any, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], float]:
    ids, margin = list(prompt), float("inf")
    for _ in range(NEW_TOKENS):
        best = _logits(model, tuple(ids))[-1].topk(2)
        margin = min(margin, float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
        if margin < LEAST_MARGIN:
            break
    return tuple(ids[len(prompt):]), margin
