"""Laws of the tables of sparse families: strict both ways; layers that predict further tokens are left unread."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from batchgen_beam.config.model_registry import load_config
from batchgen_beam.errors import CheckpointError
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.weights.checkpoint import check_checkpoint
from batchgen_beam.weights.loader import load_model
from batchgen_beam.weights.name_tables import expected_parameters

COMMON = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4,
          "num_key_value_heads": 2, "head_dim": 2, "max_position_embeddings": 64, "eos_token_id": 1,
          "num_experts_per_tok": 2}
LATENT = {**COMMON, "num_key_value_heads": 4, "q_lora_rank": 6, "kv_lora_rank": 4, "qk_nope_head_dim": 4,
          "qk_rope_head_dim": 2, "v_head_dim": 3, "n_routed_experts": 4, "moe_intermediate_size": 5,
          "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {**COMMON, "num_local_experts": 3},
    "qwen3_moe": {**COMMON, "num_experts": 3, "moe_intermediate_size": 5, "mlp_only_layers": [0]},
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": {**LATENT, "num_nextn_predict_layers": 1},
    "kimi_k2": {**LATENT, "num_nextn_predict_layers": 0, "attention_bias": True},
    "gpt_oss": {**COMMON, "num_local_experts": 3},
}


def write(folder: Path, model_type: str, *, without: str | None = None, more: tuple[str, ...] = ()) -> Path:
    """A checkpoint with one stored tensor left out, or others added."""
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **FAMILIES[model_type]}))
    parameters = expected_parameters(load_config(str(folder)))
    shapes = {p.stored: p.stored_shape or p.shape for p in parameters} | dict.fromkeys(more, (3,))
    numbers = {name: torch.arange(math.prod(shape)).reshape(shape) / 7 for name, shape in shapes.items()}
    save_file({name: tensor for name, tensor in numbers.items() if name != without}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_tensor_is_needed_and_no_other_taken(model_type: str, tmp_path: Path) -> None:
    """A missing tensor of any part, and one that the table does not know, are refused by name."""
    facts = check_checkpoint(write(tmp_path, model_type))
    for name in sorted({tensor.name for tensor in facts.tensors.values()})[::5]:
        with pytest.raises(CheckpointError, match=r"1 missing|is absent|missing layers"):
            check_checkpoint(write(tmp_path, model_type, without=name))
    unknown = "model.layers.1.mlp.experts.0.extra.weight"
    with pytest.raises(CheckpointError, match=f"1 unknown \\({unknown}\\)"):
        check_checkpoint(write(tmp_path, model_type, more=(unknown,)))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_model_asks_for_what_the_table_has(model_type: str, tmp_path: Path) -> None:
    """A model can be built from the table's tensors, each asked for once; routers stay float32 in a bfloat16 run."""
    facts = check_checkpoint(write(tmp_path, model_type))
    load_model(tmp_path, TorchKernels(torch.bfloat16))
    exact = {name.split(".", 2)[2] for name, parameter in facts.parameters.items() if parameter.exact}
    assert {"router"} <= exact <= {"router", "router.bias", "router.correction", "attention.sinks"}
    assert facts.stored_bytes == 4 * sum(
        math.prod(tensor.shape) for tensor in {tensor.name: tensor for tensor in facts.tensors.values()}.values())


def test_layers_that_predict_further_tokens_are_ignored(tmp_path: Path) -> None:
    """Of as many layers as config.json announces, by name and counted; of more the files are refused."""
    names = ("model.layers.2.eh_proj.weight", "model.layers.2.enorm.weight", "model.layers.2.mlp.experts.3.x.weight")
    assert check_checkpoint(write(tmp_path, "deepseek_v3", more=names)).ignored == tuple(sorted(names))
    for model_type, name in (("deepseek_v3", "model.layers.3.enorm.weight"), ("kimi_k2", names[1])):
        with pytest.raises(CheckpointError, match=r"config\.json says 2 layers"):
            check_checkpoint(write(tmp_path, model_type, more=(name,)))


def test_interleaved_experts_are_taken_apart(tmp_path: Path) -> None:
    """GPT-OSS: gate is the even outputs and up the odd ones of `[experts, inputs, outputs]`, biases likewise."""
    facts = check_checkpoint(write(tmp_path, "gpt_oss"))
    whole = torch.arange(3 * 8 * 24).reshape(3, 8, 24)
    for part, first in (("gate", 0), ("up", 1)):
        cut = facts.parameters[f"layers.1.experts.2.{part}"].cut
        assert cut is not None
        assert torch.equal(cut.take(whole[cut.expert]), whole[2, :, first::2].T)
        assert torch.equal(cut.take(whole[cut.expert, 0]), whole[2, 0, first::2])
