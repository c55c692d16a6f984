"""Laws of a language model inside a larger checkpoint: other parts are left unread by name, and nothing else is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from batchgen_beam.config.model_registry import load_config
from batchgen_beam.errors import CheckpointError
from batchgen_beam.weights.checkpoint import check_checkpoint
from batchgen_beam.weights.name_tables import expected_parameters

TEXT = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_experts_per_tok": 2, "q_lora_rank": 6, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2,
        "v_head_dim": 3, "n_routed_experts": 4, "moe_intermediate_size": 5, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, "max_position_embeddings": 64, "eos_token_id": 1, "model_type": "kimi_k2"}
IMAGES = ("vision_tower.blocks.0.weight", "mm_projector.proj.0.weight", "model.multi_modal_projector.norm.weight")


def plain(folder: Path) -> dict[str, Tensor]:
    """The tensors of the language model, and its config.json in the folder."""
    config = {"model_type": "kimi_k25", "tie_word_embeddings": False, "text_config": TEXT, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    return {p.stored: torch.ones(p.shape) for p in expected_parameters(load_config(str(folder)))}


def outer(name: str, form: str) -> str:
    """A name as tools write it: the language model in front, inside `model.`, or as if it were alone."""
    if form == "inside" and name.startswith("model."):
        return name.replace("model.", "model.language_model.", 1)
    return f"language_model.{name}" if form == "in front" else name


@pytest.mark.parametrize("form", ["in front", "inside", "alone"])
def test_every_spelling_is_the_same_model(tmp_path: Path, form: str) -> None:
    """The prefixes that tools write lead to the same parameters; parts for images are listed as ignored."""
    tensors = plain(tmp_path)
    save_file({outer(name, form): tensor for name, tensor in tensors.items()}
              | {name: torch.ones(3, dtype=torch.uint8) for name in IMAGES}, tmp_path / "model.safetensors")
    facts = check_checkpoint(tmp_path)
    assert facts.ignored == tuple(sorted(IMAGES))
    assert {tensor.name for tensor in facts.tensors.values()} == {outer(name, form) for name in tensors}


@pytest.mark.parametrize(("name", "message"), [
    ("model.norm.weight", r"with and without the prefix .*: (language_model\.)?model\.norm\.weight$"),
    ("audio_tower.weight", r"1 unknown \(audio_tower\.weight\)"),
    ("language_model.model.layers.1.mlp.extra.weight", r"1 unknown \(model\.layers\.1\.mlp\.extra\.weight\)"),
])
def test_nothing_else_is_left_unread(tmp_path: Path, name: str, message: str) -> None:
    """A tensor under two names, and one that no table and no list of other parts knows, are refused by name."""
    tensors = {outer(stored, "in front"): tensor for stored, tensor in plain(tmp_path).items()}
    save_file({**tensors, name: torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        check_checkpoint(tmp_path)
