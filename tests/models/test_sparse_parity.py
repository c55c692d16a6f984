"""Sparse and latent-attention families against transformers on tiny checkpoints, and the law of batches for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.interface import Model
from batchgen_beam.weights.loader import load_model
from tests.models.paged import PagedRun, greedy
from tests.models.parity import KERNELS, TOLERANCE, VISIBLE, largest_difference, neutralise
from tests.models.tiny import NEW_TOKENS, QUANTISED, TINIES, Reference, make_reference, stored_tensors

PROMPT = [(5 * i * i + 3 * i + 1) % 320 for i in range(45)]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Checkpoints by name, made once each."""
    return cache(lambda name: make_reference((TINIES | QUANTISED)[name], tmp_path_factory.mktemp("tiny") / "model"))


@pytest.mark.parametrize("name", TINIES | QUANTISED)
def test_logits_and_greedy_tokens_equal_transformers(name: str, references: Callable[[str], Reference]) -> None:
    """Every prompt token's logits within 1e-4, greedy tokens equal; prompts are shorter and longer than windows."""
    reference = references(name)
    assert largest_difference(reference.folder, reference) < TOLERANCE
    model = load_model(reference.folder, KERNELS)
    for prompt, expected in zip(reference.prompts, reference.greedy, strict=True):
        assert tuple(greedy(PagedRun(model, KERNELS), "x", prompt, NEW_TOKENS)) == expected


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_weights_are_their_values(name: str, references: Callable[[str], Reference]) -> None:
    """A quantised checkpoint's logits have the bits of those of the checkpoint of its dequantised values."""
    reference = references(name)
    stored = {tensor.dtype for tensor in stored_tensors(reference.folder).values()}
    assert not stored <= {torch.float32, torch.bfloat16}
    for dtype in (torch.float32, torch.bfloat16):
        kernels = TorchKernels(dtype)
        assert torch.equal(whole(load_model(reference.folder, kernels), kernels),
                           whole(load_model(reference.plain, kernels), kernels))


def rope(**keys: Any) -> dict[str, Any]:
    """A change inside the rope; None takes a key away."""
    return {"rope_parameters": keys}


NO_YARN = rope(rope_type="default", factor=None, beta_fast=None, beta_slow=None, mscale=None, mscale_all_dim=None,
               original_max_position_embeddings=None, truncate=None)
MUTATIONS = [
    ("mixtral", {"num_experts_per_tok": 3}),
    ("mixtral", {"sliding_window": 8}),
    ("mixtral", rope(rope_theta=20000.0)),
    ("mixtral, window", {"sliding_window": None}),
    ("mixtral, window", {"sliding_window": 9}),
    ("mixtral, window", {"sliding_window": 7}),
    ("qwen3_moe", {"norm_topk_prob": False}),
    ("qwen3_moe", {"num_experts_per_tok": 2}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}),
    ("deepseek_v2", {"topk_group": 4}),
    ("deepseek_v2", {"topk_method": "greedy"}),
    ("deepseek_v2", {"routed_scaling_factor": 1.0}),
    ("deepseek_v2", NO_YARN),
    ("deepseek_v2", rope(mscale=0.5)),
    ("deepseek_v2", {"rms_norm_eps": 1e-6}),
    ("deepseek_v2_lite", NO_YARN),
    ("deepseek_v2_lite", rope(factor=2.0)),
    ("deepseek_v2_lite", {"routed_scaling_factor": 2.0}),
    ("deepseek_v3", {"topk_group": 4}),
    ("deepseek_v3", {"norm_topk_prob": False}),
    ("deepseek_v3", {"routed_scaling_factor": 1.0}),
    ("deepseek_v3", rope(mscale=None, mscale_all_dim=None, attention_factor=1.0)),
    ("deepseek_v3", rope(beta_fast=32.0)),
    ("deepseek_v3", rope(beta_slow=0.1)),
    ("kimi_k2", {"rms_norm_eps": 1e-6}),
    ("kimi_k2", {"routed_scaling_factor": 1.0}),
    ("kimi_k2", {"norm_topk_prob": False}),
    ("kimi_k2", NO_YARN),
    ("kimi_k2", rope(factor=2.0)),
    ("kimi_k25", {"rms_norm_eps": 1e-6}),
    ("kimi_k25", {"routed_scaling_factor": 1.0}),
    ("kimi_k25", {"rope_theta": 10000.0}),
    ("kimi_k25", {"rope_scaling": None}),
    ("gpt_oss", {"sliding_window": 4096}),
    ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    ("gpt_oss", {"swiglu_limit": 7.0}),
    ("gpt_oss", {"swiglu_alpha": 1.0}),
    ("gpt_oss", rope(truncate=True)),
    ("gpt_oss", NO_YARN),
]


@pytest.mark.parametrize(("name", "change"), MUTATIONS, ids=[f"{name}: {change}" for name, change in MUTATIONS])
def test_each_mechanism_matters(name: str, change: dict[str, Any], tmp_path: Path,
                                references: Callable[[str], Reference]) -> None:
    """With one mechanism switched off or one number changed, the comparison fails clearly."""
    reference = references(name)
    config = json.loads((reference.folder / "config.json").read_text())
    text = config.get("text_config", config)
    inner = {**text.get("rope_parameters", {}), **change.get("rope_parameters", {})}
    text |= change | {"rope_parameters": {key: value for key, value in inner.items() if value is not None} or None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for file in reference.folder.glob("model*"):
        (tmp_path / file.name).symlink_to(file)
    assert largest_difference(tmp_path, reference) > VISIBLE


WEIGHTS = [(name, part) for name, parts in {
    "qwen3_moe": ("q_norm.weight", "k_norm.weight"),
    "deepseek_v2": ("shared_experts.down_proj.weight", "q_a_layernorm.weight"),
    "deepseek_v2_lite": ("shared_experts.down_proj.weight", "kv_a_layernorm.weight"),
    "deepseek_v3": ("e_score_correction_bias", "shared_experts.down_proj.weight", "kv_a_layernorm.weight"),
    "kimi_k25": ("e_score_correction_bias", "shared_experts.down_proj.weight"),
    "gpt_oss": ("sinks", "router.bias", "gate_up_proj_bias", "down_proj_bias", "o_proj.bias"),
    "deepseek_v3, fp8": ("down_proj.weight_scale_inv", "kv_a_proj_with_mqa.weight_scale_inv"),
    "gpt_oss, mxfp4": ("gate_up_proj_scales", "down_proj_scales"),
    "kimi_k25, int4": ("gate_proj.weight_scale", "down_proj.weight_scale"),
}.items() for part in parts]


@pytest.mark.parametrize(("name", "part"), WEIGHTS)
def test_each_small_weight_matters(name: str, part: str, tmp_path: Path,
                                   references: Callable[[str], Reference]) -> None:
    """With a norm's weights at 1, or a bias, a sink, a shared expert or a scale at 0, the comparison fails clearly."""
    reference = references(name)
    neutralise(reference, stored_tensors(reference.folder), part, tmp_path)
    assert largest_difference(tmp_path, reference) > VISIBLE


def whole(model: Model, kernels: TorchKernels) -> Tensor:
    """Logits of every token of the prompt, alone and in one pass."""
    return PagedRun(model, kernels).forward(("x", PROMPT), every=True)


LAWFUL = [(name, dtype) for name in ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_oss")
          for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), LAWFUL)
def test_neither_company_nor_chunks_nor_loss_changes_a_bit(name: str, dtype: torch.dtype,
                                                           references: Callable[[str], Reference]) -> None:
    """A row's logits have the same bits alone, in chunks, among others, decoded, and computed again."""
    kernels = TorchKernels(dtype)
    model = load_model(references(name).folder, kernels)
    alone = whole(model, kernels)
    run = PagedRun(model, kernels)
    others = [("a", PROMPT[3:9]), ("b", PROMPT[20:21]), ("c", PROMPT[:40])]
    parts = [run.forward(("x", PROMPT[:7]), every=True)]
    mixed = run.forward(*others[:2], ("x", PROMPT[7:20]), others[2], every=True)
    parts += [mixed[7:20], run.forward(("x", PROMPT[20:21])), run.forward(("a", [5]), ("x", PROMPT[21:22]))[1:],
              run.forward(("x", PROMPT[22:]), ("b", PROMPT[:33]), every=True)[:len(PROMPT) - 22]]
    assert torch.equal(torch.cat(parts), alone)
    assert torch.equal(run.forward(("again", PROMPT), every=True), alone)


def test_int8_pages_hold_latent_entries(references: Callable[[str], Reference]) -> None:
    """Kept as int8, the latent cache moves logits a little, and the law of batches holds."""
    kernels = TorchKernels(torch.float32, kv_dtype=torch.int8)
    model = load_model(references("deepseek_v3").folder, kernels)
    alone = whole(model, kernels)
    exact = whole(load_model(references("deepseek_v3").folder, KERNELS), KERNELS)
    assert 0 < float((alone[:8] - exact[:8]).abs().max()) < 1.0
    run = PagedRun(model, kernels)
    parts = [run.forward(("x", PROMPT[i:i + 9]), ("y", PROMPT[:5]), every=True)[:9] for i in range(0, 45, 9)]
    assert torch.equal(torch.cat(parts), alone)


def test_experts_in_one_tensor_are_the_same_model(tmp_path: Path, references: Callable[[str], Reference]) -> None:
    """Gate and up of all experts in one tensor `[E, 2 M, D]`, as some tools write them, load to the same bits."""
    for name, module in (("qwen3_moe", "mlp"), ("mixtral", "block_sparse_moe")):
        reference, folder = references(name), tmp_path / name
        folder.mkdir()
        (folder / "config.json").symlink_to(reference.folder / "config.json")
        save_file(fused(stored_tensors(reference.folder), module), folder / "model.safetensors")
        assert torch.equal(whole(load_model(folder, KERNELS), KERNELS),
                           whole(load_model(reference.folder, KERNELS), KERNELS))


def fused(stored: dict[str, Tensor], module: str) -> dict[str, Tensor]:
    """The same tensors with those of all experts stacked, under the names that such files have."""
    gate, up, down = ("w1", "w3", "w2") if module == "block_sparse_moe" else ("gate_proj", "up_proj", "down_proj")
    found = {key.replace(module, "mlp"): tensor for key, tensor in stored.items() if ".experts." not in key}
    for prefix in {key.split(".experts.")[0] for key in stored if ".experts." in key}:
        count = sum(key.startswith(f"{prefix}.experts.") for key in stored) // 3
        part = {name: torch.stack([stored[f"{prefix}.experts.{e}.{name}.weight"] for e in range(count)])
                for name in (gate, up, down)}
        at = prefix.replace(module, "mlp") + ".experts."
        found |= {f"{at}gate_up_proj": torch.cat((part[gate], part[up]), 1), f"{at}down_proj": part[down]}
    return found
