"""Hand-made Llama checkpoints of a few hundred numbers, sound unless a test breaks them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN, INTERMEDIATE, VOCABULARY, HEADS, KV_HEADS, HEAD_SIZE = 8, 12, 16, 4, 2, 2
INDEX = "model.safetensors.index.json"


def config_values(**changes: object) -> dict[str, object]:
    """The config.json of the tiny model; None removes a key."""
    values: dict[str, object] = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "vocab_size": VOCABULARY, "num_hidden_layers": 2,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 64,
        "tie_word_embeddings": False, "eos_token_id": 1, **changes}
    return {key: value for key, value in values.items() if value is not None}


def tensors(*, head: bool = True) -> dict[str, Tensor]:
    """All tensors of the tiny model by checkpoint name."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if head:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (HIDDEN,),
            f"{prefix}.post_attention_layernorm.weight": (HIDDEN,),
            f"{prefix}.self_attn.q_proj.weight": (HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": (KV_HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": (KV_HEADS * HEAD_SIZE, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_SIZE),
            f"{prefix}.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write_config(folder: Path, **changes: object) -> Path:
    """A folder with this config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_values(**changes)))
    return folder


def write_single(folder: Path, stored: Mapping[str, Tensor], **changes: object) -> Path:
    """config.json and model.safetensors."""
    write_config(folder, **changes)
    save_file(dict(stored), folder / "model.safetensors")
    return folder


def write_shards(folder: Path, stored: Mapping[str, Tensor], count: int = 3, **changes: object) -> Path:
    """config.json, `count` shards and their index."""
    write_config(folder, **changes)
    names = sorted(stored)
    weight_map = {}
    for shard in range(count):
        file = f"model-{shard + 1:05}-of-{count:05}.safetensors"
        part = {name: stored[name] for name in names[shard::count]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def edit_index(folder: Path, changes: Mapping[str, str | None]) -> None:
    """Change or (None) remove entries of the index."""
    index = json.loads((folder / INDEX).read_text())
    merged = {**index["weight_map"], **changes}
    index["weight_map"] = {name: file for name, file in merged.items() if file is not None}
    (folder / INDEX).write_text(json.dumps(index))
