"""The memory that weights take under a limit, as the system counts it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from batchgen_beam.config.model_registry import load_config
from batchgen_beam.text.fake_folder import write_fake_folder
from batchgen_beam.weights.name_tables import expected_parameters
from tests.kernels.sets import NEEDS_NATIVE

CONSTANT = 32 << 20
"""Bytes beside the limit: what the allocator keeps, the largest of the fixed tensors while it is packed, the KV pages
and activations of 64 tokens, and code that is loaded late."""

LIMIT = 176 << 20
"""Room for two feed-forward parts of `LLAMA` and little more; the self-test does not reach it."""

MIXTRAL = {"model_type": "mixtral", "hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 2,
           "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 320, "max_position_embeddings": 512,
           "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False, "sliding_window": None}
LLAMA = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 12288, "num_hidden_layers": 5,
         "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 320, "max_position_embeddings": 512,
         "tie_word_embeddings": False}


def checkpoint(folder: Path, config: Mapping[str, Any]) -> int:
    """Random bfloat16 weights, a file for each layer; all their bytes."""
    write_fake_folder(folder)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    total, index = 0, {}
    by_file: dict[str, dict[str, torch.Tensor]] = {}
    for parameter in expected_parameters(load_config(str(folder))):
        file = f"part-{parameter.name.split('.')[1] if '.' in parameter.name else 'rest'}.safetensors"
        tensor = torch.randn(parameter.shape, generator=generator).to(torch.bfloat16) * 0.03
        by_file.setdefault(file, {})[parameter.stored] = tensor
        index[parameter.stored] = file
        total += tensor.nbytes
    for file, tensors in by_file.items():
        save_file(tensors, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return total


@pytest.mark.parametrize(("kernels", "config"), [
    pytest.param("torch", MIXTRAL, id="mixtral-torch"),
    pytest.param("native", LLAMA, id="llama-native", marks=NEEDS_NATIVE),
])
def test_the_process_grows_by_the_limit_and_a_constant(kernels: str, config: Mapping[str, Any],
                                                       tmp_path: Path) -> None:
    """A model of over twice the limit is converted, with a product of a layer twice in memory and never a whole
    feed-forward part beside it; then its kernels are tested, it is loaded and run.  The peak of the process stays
    within limit and constant, and the first step reads all that is not resident."""
    total = checkpoint(tmp_path / "model", config)
    assert total > 2 * LIMIT
    found = json.loads(subprocess.run(
        [sys.executable, "-m", "tests.weights.streaming_child", tmp_path / "model", tmp_path / "cache", kernels,
         str(LIMIT)], check=True, stdout=subprocess.PIPE).stdout)
    assert found["answers"] == 1
    gate_up = 2 * 2 * config["hidden_size"] * config["intermediate_size"]
    assert gate_up <= found["converting"] <= 2 * gate_up + CONSTANT < 3.5 * gate_up
    assert found["grown"] <= LIMIT + CONSTANT
    assert found["grown"] >= found["ring"]  # the count sees the buffers
    assert found["streamed"] >= total - LIMIT
    assert found["streamed"] <= found["read"] <= found["steps"] * found["streamed"] + 2 * found["ring"]
