"""The Llama architecture against transformers, on tiny checkpoints that transformers saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.weights.loader import load_model
from tests.models.paged import PagedRun, greedy
from tests.models.parity import KERNELS, TOLERANCE, VISIBLE, largest_difference, neutralise
from tests.models.tiny_llama import NEW_TOKENS, TINIES, Reference, make_reference

BFLOAT16_TOLERANCE = 0.15
"""Three layers of 8-bit mantissas: 2 ** -8 relative for each operation, logits up to 5."""


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Checkpoints by name, made once each."""
    return cache(lambda name: make_reference(TINIES[name], tmp_path_factory.mktemp("tiny") / "model"))


@pytest.mark.parametrize("name", TINIES)
def test_logits_and_greedy_tokens_equal_transformers(name: str, references: Callable[[str], Reference]) -> None:
    """Logits of every prompt token are within 1e-4, and 24 greedy tokens are equal; token by token too."""
    reference = references(name)
    assert largest_difference(reference.folder, reference) < TOLERANCE
    model = load_model(reference.folder, KERNELS)
    for prompt, expected in zip(reference.prompts, reference.greedy, strict=True):
        assert tuple(greedy(PagedRun(model, KERNELS), "x", prompt, NEW_TOKENS)) == expected
    run = PagedRun(model, KERNELS)
    for token, logits in zip(reference.prompts[1], reference.logits[1], strict=True):
        assert float((run.forward(("x", [token]))[0] - logits).abs().max()) < TOLERANCE


def rope(**keys: Any) -> dict[str, Any]:
    """A change inside the rope; None takes a key away."""
    return {"rope_parameters": keys}


MUTATIONS = [
    ("llama3", rope(rope_type="default", factor=None, low_freq_factor=None, high_freq_factor=None,
                    original_max_position_embeddings=None)),
    ("llama3", rope(factor=4.0)),
    ("llama3", rope(low_freq_factor=2.0)),
    ("llama3", rope(high_freq_factor=8.0)),
    ("llama3", rope(original_max_position_embeddings=64)),
    ("linear", rope(rope_type="default", factor=None)),
    ("linear", rope(factor=2.0)),
    ("yarn", rope(rope_type="linear", original_max_position_embeddings=None, beta_fast=None, beta_slow=None)),
    ("yarn", rope(factor=4.0)),
    ("yarn", rope(beta_fast=1.0)),
    ("yarn", rope(beta_slow=1.0)),
    ("yarn", rope(attention_factor=1.0)),
    ("yarn", rope(truncate=False)),
    ("yarn, mscale, no truncation", rope(mscale=None, mscale_all_dim=None)),
    ("yarn, mscale, no truncation", rope(truncate=True)),
    ("plain", rope(rope_theta=20000.0)),
    ("mlp_bias, eps 1e-2", {"rms_norm_eps": 1e-5}),
]


@pytest.mark.parametrize(("name", "change"), MUTATIONS, ids=[f"{name}: {change}" for name, change in MUTATIONS])
def test_each_number_of_the_configuration_matters(name: str, change: dict[str, Any], tmp_path: Path,
                                                  references: Callable[[str], Reference]) -> None:
    """With one mechanism switched off or one number changed, the comparison fails clearly."""
    reference = references(name)
    config = json.loads((reference.folder / "config.json").read_text())
    inner = {**config["rope_parameters"], **change.get("rope_parameters", {})}
    changed = {**config, **change, "rope_parameters": {key: value for key, value in inner.items() if value is not None}}
    assert largest_difference(with_config(reference, tmp_path, changed), reference) > VISIBLE


def with_config(reference: Reference, folder: Path, config: dict[str, Any]) -> Path:
    """The reference's weights under another config.json."""
    (folder / "config.json").write_text(json.dumps(config))
    for file in reference.folder.glob("model*"):
        (folder / file.name).symlink_to(file)
    return folder


SMALL = [(name, part) for name, parts in {
    "plain": ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight"),
    "attention_bias": ("q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"),
    "mlp_bias, eps 1e-2": ("gate_proj.bias", "up_proj.bias", "down_proj.bias"),
}.items() for part in parts]


@pytest.mark.parametrize(("name", "part"), SMALL)
def test_each_norm_and_bias_matters(name: str, part: str, tmp_path: Path,
                                    references: Callable[[str], Reference]) -> None:
    """With a norm's weights at 1 or a bias at 0 in every layer, the comparison fails clearly."""
    reference = references(name)
    (file,) = reference.folder.glob("*.safetensors")
    neutralise(reference, load_file(file), part, tmp_path)
    assert largest_difference(tmp_path, reference) > VISIBLE


def test_a_checkpoint_of_several_shards_is_one(references: Callable[[str], Reference]) -> None:
    """The sharded tiny really has several shards, and the other ones have one."""
    assert len(list(references("as many kv heads, several shards").folder.glob("*.safetensors"))) > 2
    assert len(list(references("plain").folder.glob("*.safetensors"))) == 1


def test_bfloat16_chooses_the_same_tokens(references: Callable[[str], Reference]) -> None:
    """In bfloat16, at every prompt token whose best token leads clearly in the reference, that token is ours too."""
    reference = references("plain")
    kernels = TorchKernels(torch.bfloat16)
    model = load_model(reference.folder, kernels)
    clear = 0
    for prompt, logits in zip(reference.prompts, reference.logits, strict=True):
        ours = PagedRun(model, kernels).forward(("x", prompt), every=True)
        assert ours.dtype == torch.float32
        assert float((ours - logits).abs().max()) < BFLOAT16_TOLERANCE
        best = logits.topk(2).values
        leads = best[:, 0] - best[:, 1] > 2 * BFLOAT16_TOLERANCE  # each of the two may move by the tolerance
        assert torch.equal(ours.argmax(1)[leads], logits.argmax(1)[leads])
        clear += int(leads.sum())
    assert clear > 10
