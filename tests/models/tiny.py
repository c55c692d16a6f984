"""Tiny random checkpoints of sparse families made with transformers, and what transformers answers on them.

Sizes are chosen so that every mechanism shows: windows of 8 tokens, YaRN with a ramp inside 16 rotated values, several
groups of experts, an epsilon of 1e-2 where some norms have their own.  The reference is a full forward pass without
cache, eager attention, float32; of a quantised checkpoint, one on its dequantised values.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
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

from tests.models.parity import their_greedy, their_logits
from tests.weights.quantized_tensors import FORMS, GPT_OSS_EXPERTS, Form

VOCABULARY = 320
NEW_TOKENS = 12

COMMON = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1,
          "eos_token_id": 2, "pad_token_id": None, "tie_word_embeddings": False}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 2.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 64}
LATENT = {**COMMON, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16,
          "qk_rope_head_dim": 16, "v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 3,
          "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
          "rms_norm_eps": 1e-2}


IMAGES = {"vision_tower.patch_embed.proj.weight": (4, 3, 2, 2), "mm_projector.proj.0.weight": (8, 8)}
"""Tensors for images that stand beside a language model."""


@dataclass(frozen=True, kw_only=True)
class Quantised:
    """How weights whose names end so are stored: `form` as in `tests.weights.quantized_tensors`."""

    form: Form
    ends: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """One checkpoint: classes, keys, and what config.json says otherwise than transformers writes it.

    A key that is `said` to be None is left out.  `predicting` adds layers behind the last that predict further tokens.
    `inside` is the type of an outer model whose text part this is.
    """

    config: type
    model: type
    keys: Mapping[str, Any]
    said: Mapping[str, Any] = field(default_factory=dict)
    quantised: Quantised | None = None
    predicting: int = 0
    inside: str | None = None


KIMI_KEYS = {**LATENT, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
             "num_nextn_predict_layers": 0}
KIMI_YARN = {**YARN, "rope_theta": 50000.0, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}
KIMI_SAID = {"model_type": "kimi_k2", "rope_parameters": None, "rope_theta": 50000.0,
             "rope_scaling": {"type": "yarn"} | {key: value for key, value in KIMI_YARN.items() if "rope_" not in key}}
KIMI_K25 = Tiny(config=DeepseekV3Config, model=DeepseekV3ForCausalLM, said=KIMI_SAID, inside="kimi_k25",
                keys={**KIMI_KEYS, "rope_parameters": KIMI_YARN})
DEEPSEEK_V3 = {**LATENT, "n_shared_experts": 1, "num_nextn_predict_layers": 1,
               "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}
GPT_OSS = {**COMMON, "head_dim": 16, "num_hidden_layers": 4, "intermediate_size": 64, "num_local_experts": 8,
           "num_experts_per_tok": 3, "sliding_window": 8, "swiglu_limit": 2.0,
           "rope_parameters": {**YARN, "truncate": False}}


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
    "deepseek_v3": Tiny(config=DeepseekV3Config, model=DeepseekV3ForCausalLM, keys=DEEPSEEK_V3, predicting=1),
    "kimi_k2": Tiny(config=DeepseekV3Config, model=DeepseekV3ForCausalLM, said={"model_type": "kimi_k2"},
                    keys={**KIMI_KEYS, "rope_parameters": KIMI_YARN}),
    "kimi_k25": KIMI_K25,
    "gpt_oss": Tiny(config=GptOssConfig, model=GptOssForCausalLM, keys=GPT_OSS),
}

QUANTISED = {
    "deepseek_v3, fp8": Tiny(
        config=DeepseekV3Config, model=DeepseekV3ForCausalLM, predicting=1,
        keys={**DEEPSEEK_V3, "hidden_size": 160, "intermediate_size": 144, "moe_intermediate_size": 40,
              "num_hidden_layers": 2},
        quantised=Quantised(form=FORMS["fp8 ragged last blocks"], ends=("_proj.weight", "_proj_with_mqa.weight"))),
    "gpt_oss, mxfp4": Tiny(
        config=GptOssConfig, model=GptOssForCausalLM, keys=GPT_OSS,
        quantised=Quantised(form=GPT_OSS_EXPERTS, ends=("experts.gate_up_proj", "experts.down_proj"))),
    "kimi_k25, int4": replace(KIMI_K25, quantised=Quantised(form=FORMS["int4"], ends=tuple(
        f".mlp.experts.{e}.{part}_proj.weight" for e in range(8) for part in ("gate", "up", "down")))),
}
"""Sizes that no block of 128 divides; every weight that published checkpoints quantise, and no other."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A saved checkpoint, prompts, and for each prompt the logits of all its tokens and its greedy continuation.

    `plain` is the same checkpoint dequantised, where that is another.
    """

    folder: Path
    plain: Path
    prompts: tuple[tuple[int, ...], ...]
    logits: tuple[Tensor, ...]
    greedy: tuple[tuple[int, ...], ...]


def make_reference(tiny: Tiny, folder: Path) -> Reference:
    """Save the first of some seeded checkpoints whose greedy choices are all clear."""
    prompts = tuple(tuple((7 * i * i + 3 * i + 11 * n) % VOCABULARY for i in range(n)) for n in (3, 15, 63))
    plain = folder if tiny.quantised is None else folder.with_name(f"{folder.name}-plain")
    for seed in range(100):
        model = random_model(tiny, seed)
        model.save_pretrained(plain, max_shard_size="100KB")
        quantised: dict[str, Tensor] = {}
        if tiny.quantised is not None:
            quantised = _quantise(tiny.quantised, plain, seed)
            model = tiny.model.from_pretrained(plain, attn_implementation="eager", dtype=torch.float32).eval()
        greedy = their_greedy(model, prompts, NEW_TOKENS)
        if greedy is not None:
            break
    else:
        raise AssertionError("no seed of 100 has clear greedy choices")
    config = json.loads((plain / "config.json").read_text())
    if tiny.quantised is not None:
        stored = {name: tensor for name, tensor in stored_tensors(plain).items()
                  if not name.endswith(tiny.quantised.ends)}
        _publish(tiny, folder, config, stored | quantised)
        _publish(replace(tiny, quantised=None), plain, config, stored_tensors(plain))
    elif tiny.predicting or tiny.inside:
        _publish(tiny, folder, config, stored_tensors(folder))
    else:
        _write_config(tiny, folder, config)
    return Reference(folder=folder, plain=plain, prompts=prompts, logits=tuple(their_logits(model, p) for p in prompts),
                     greedy=greedy)


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """All of a checkpoint's tensors."""
    return {key: tensor for file in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(file).items()}


def _quantise(how: Quantised, folder: Path, seed: int) -> dict[str, Tensor]:
    """Put random weights that have a quantised form into a plain checkpoint, and return them in that form."""
    generator = torch.Generator().manual_seed(seed)
    plain, parts = stored_tensors(folder), dict[str, Tensor]()
    for name, tensor in sorted(plain.items()):
        if name.endswith(how.ends):
            made, plain[name] = how.form.make(tensor.shape, generator)
            parts |= {name + end: part for end, part in made.items()}
    assert parts
    _save(folder, plain)
    return parts


def _save(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """In one file, in place of whatever weights the folder holds."""
    folder.mkdir(exist_ok=True)
    for file in folder.glob("model*"):
        file.unlink()
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})


def _publish(tiny: Tiny, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The checkpoint as it would be published: with what stands beside the model, and under outer names."""
    last = config["num_hidden_layers"] - 1
    for more in range(1, tiny.predicting + 1):
        old, new = f"model.layers.{last}.", f"model.layers.{last + more}."
        tensors |= {name.replace(old, new): tensor for name, tensor in tensors.items() if name.startswith(old)}
        tensors[f"{new}eh_proj.weight"] = torch.ones(3, 6)
    if tiny.inside:
        tensors = ({f"language_model.{name}": tensor for name, tensor in tensors.items()}
                   | {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in IMAGES.items()})
    _save(folder, tensors)
    _write_config(tiny, folder, config)


def _write_config(tiny: Tiny, folder: Path, config: dict[str, Any]) -> None:
    absent = {key for key, value in tiny.said.items() if value is None}
    found = {key: value for key, value in {**config, **tiny.said}.items() if key not in absent}
    if tiny.quantised is not None:
        found["quantization_config"] = tiny.quantised.form.config
    if tiny.inside:
        found = {"model_type": tiny.inside, "tie_word_embeddings": False, "vision_config": {}, "text_config": found}
    (folder / "config.json").write_text(json.dumps(found))


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
