"""Laws of the sizes: they are what transformers' own models have, and the published figures of real ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from batchgen_beam.config.model_registry import get_registered_models, load_config
from batchgen_beam.config.model_sizes import model_sizes
from batchgen_beam.config.quantization import Quantization, read_quantization
from batchgen_beam.config.reading import JsonObject
from batchgen_beam.config.sizes import Cache, ModelSizes, WeightForm
from batchgen_beam.config.stored_bytes import matrix_bytes
from batchgen_beam.errors import CheckpointError
from tests.package_sources import ROOT

BFLOAT16 = WeightForm(dtype="bfloat16")

COMMON = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
          "vocab_size": 96, "intermediate_size": 48}
LATENT = {**COMMON, "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 32, "qk_nope_head_dim": 12,
          "qk_rope_head_dim": 8, "v_head_dim": 20, "n_routed_experts": 6, "n_shared_experts": 2,
          "moe_intermediate_size": 10, "first_k_dense_replace": 1, "num_experts_per_tok": 2, "n_group": 1,
          "topk_group": 1}
FAMILIES: dict[str, list[dict[str, Any]]] = {
    "llama": [COMMON, {**COMMON, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}],
    "qwen2": [COMMON],
    "qwen3": [{**COMMON, "head_dim": 24}],
    "qwen2_moe": [{**COMMON, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28, "num_experts": 5,
                   "mlp_only_layers": [1]}],
    "qwen3_moe": [{**COMMON, "head_dim": 24, "moe_intermediate_size": 20, "num_experts": 5, "decoder_sparse_step": 2}],
    "mistral": [{**COMMON, "head_dim": 24}],
    "mixtral": [{**COMMON, "num_local_experts": 5}],
    "phi": [{**COMMON, "num_key_value_heads": 4}, {**COMMON, "qk_layernorm": True}],
    "phi3": [{**COMMON, "pad_token_id": 0, "eos_token_id": 1}],
    "gemma2": [{**COMMON, "head_dim": 24}],
    "gemma3_text": [{**COMMON, "head_dim": 24}],
    "gpt_oss": [{**COMMON, "head_dim": 24, "num_local_experts": 5}],
    "smollm3": [{**COMMON, "pad_token_id": 0, "eos_token_id": 1}],
    "glm4_moe": [{**COMMON, "head_dim": 24, "moe_intermediate_size": 20, "n_routed_experts": 5, "use_qk_norm": True,
                  "attention_bias": True}],
    "minimax_m2": [{**COMMON, "head_dim": 24, "num_local_experts": 5}],
    "deepseek_v2": [LATENT, {**LATENT, "q_lora_rank": None}],
    "deepseek_v3": [LATENT, {**LATENT, "attention_bias": True}],
    "deepseek_v32": [{**LATENT, "index_n_heads": 3, "index_head_dim": 16}],
    "glm_moe_dsa": [{**LATENT, "index_n_heads": 3, "index_head_dim": 16,
                     "indexer_types": ["full", "full", "shared", "full"]}],
    "kimi_linear": [{**{key: value for key, value in LATENT.items() if key not in ("n_routed_experts",
                        "n_shared_experts", "q_lora_rank")},
                     "pad_token_id": 0, "num_experts": 6, "num_shared_experts": 1,
                     "linear_attn_config": {"kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 3,
                                            "head_dim": 16, "short_conv_kernel_size": 4}}],
}
CASES = [(name, values) for name, cases in FAMILIES.items() for values in cases]


def counted(model: torch.nn.Module) -> int:
    """Numbers of a model; correction biases are no parameters there, but checkpoints have them."""
    corrections = sum(tensor.numel() for name, tensor in model.named_buffers() if "e_score_correction_bias" in name)
    return corrections + sum(parameter.numel() for parameter in model.parameters())


def test_every_family_with_a_model_in_transformers_is_counted() -> None:
    """Only aliases and models that do not exist there have no case here."""
    assert set(get_registered_models()) - set(FAMILIES) == {
        "mistral3", "gemma3", "kimi_k2", "kimi_k25", "kimi_k3", "batchgen_fake"}


@pytest.mark.parametrize(("model_type", "values"), CASES)
def test_parameters_are_those_of_transformers(model_type: str, values: dict[str, Any], tmp_path: Path) -> None:
    """The sum over our parts is the number of parameters of the model that transformers builds from the same file."""
    config = CONFIG_MAPPING[model_type](**values)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert model_sizes(load_config(str(tmp_path))).parameters == counted(model)


@pytest.mark.parametrize("model_type", ["kimi_k3", "batchgen_fake"])
def test_unknown_sizes_are_refused(model_type: str) -> None:
    """A plan is never made on guessed sizes."""
    config = get_registered_models()[model_type](model_type=model_type)  # type: ignore[call-arg]
    with pytest.raises(CheckpointError, match=f"sizes of model type '{model_type}' are not known"):
        model_sizes(config)


R1: dict[str, Any] = json.loads((ROOT / "examples" / "deepseek-r1.json").read_text())
"""DeepSeek-R1's config.json, as far as sizes go."""


def r1(folder: Path, **changes: object) -> tuple[ModelSizes, WeightForm]:
    """Its sizes, and the form that its file says the weights are stored in."""
    (folder / "config.json").write_text(json.dumps({**R1, **changes}))
    config = load_config(str(folder))
    return model_sizes(config), WeightForm(dtype="bfloat16", stored=config.quantization)


def test_deepseek_r1_parameters_by_hand(tmp_path: Path) -> None:
    """671.0e9 parameters, 37.6e9 of them active, as its authors say; each part as the sum written out here."""
    sizes, _ = r1(tmp_path)
    dense, routed = sizes.layers[0], sizes.layers[3]
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168 + 7168 + 1536 + 512
    assert dense.attention.parameters == routed.attention.parameters == attention
    assert dense.dense.parameters == 3 * 7168 * 18432 + 7168
    assert routed.expert.parameters == routed.shared.parameters == 3 * 7168 * 2048
    assert routed.router.parameters == 256 * 7168 + 256
    assert [layer.experts for layer in sizes.layers] == [0] * 3 + [256] * 58
    assert sizes.embedding.parameters == 129280 * 7168 == sizes.head.parameters - 7168
    expert = 3 * 7168 * 2048
    shared_by_all = 61 * (attention + 7168) + 3 * 3 * 7168 * 18432 + 58 * (256 * 7168 + 256 + expert) + 7168
    assert sizes.parameters == shared_by_all + 58 * 256 * expert + 2 * 129280 * 7168
    assert sizes.active_parameters == shared_by_all + 58 * 8 * expert + 2 * 129280 * 7168
    assert round(sizes.parameters / 1e9, 1) == 671.0
    assert round(sizes.active_parameters / 1e9) == 38
    assert sizes.active_parameters - sizes.embedding.parameters == pytest.approx(36.6e9, rel=1e-3)


def test_deepseek_r1_bytes_by_hand(tmp_path: Path) -> None:
    """FP8 with a float32 scale for each started block of 128 by 128; router, embedding, head and norms in bfloat16."""
    sizes, form = r1(tmp_path)

    def blocks(*shapes: tuple[int, int]) -> int:
        return sum(rows * columns + 4 * -(-rows // 128) * -(-columns // 128) for rows, columns in shapes)

    attention = blocks((1536, 7168), (24576, 1536), (576, 7168), (32768, 512), (7168, 16384)) + 2 * (7168 + 1536 + 512)
    expert = blocks((2048, 7168), (2048, 7168), (7168, 2048))
    dense = blocks((18432, 7168), (18432, 7168), (7168, 18432)) + 2 * 7168
    assert sizes.layers[0].attention.bytes(form) == attention
    assert sizes.layers[3].expert.bytes(form) == sizes.layers[3].shared.bytes(form) == expert == 44_050_944
    assert sizes.layers[0].fixed_bytes(form) == dense
    router = 2 * 256 * 7168 + 4 * 256
    total = (61 * attention + 3 * dense + 58 * (router + 2 * 7168 + 257 * expert) + 2 * 2 * 129280 * 7168 + 2 * 7168)
    assert sizes.bytes(form) == total
    assert sizes.bytes(BFLOAT16) == pytest.approx(2 * sizes.parameters, rel=1e-6)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_moe", "gpt_oss"])
def test_routers_are_kept_as_the_head_is(model_type: str, tmp_path: Path) -> None:
    """In float32 or bfloat16 as the kernel set says, their biases always in float32; stored ones as they are."""
    CONFIG_MAPPING[model_type](**FAMILIES[model_type][0]).save_pretrained(tmp_path)
    layer = model_sizes(load_config(str(tmp_path))).layers[1]
    biases = 0 if model_type == "qwen3_moe" else layer.experts
    for head, size in ((None, 2), ("bfloat16", 2), ("float32", 4)):
        form = WeightForm(dtype="bfloat16", head=head)
        assert layer.router.bytes(form) == size * layer.experts * 64 + 4 * biases
        assert layer.attention.bytes(form) == layer.attention.bytes(BFLOAT16)


def test_deepseek_r1_cache_and_flops_by_hand(tmp_path: Path) -> None:
    """576 numbers of each token in each layer; 2 operations for each active weight; the past at 2 x 1088 a head."""
    sizes, _ = r1(tmp_path)
    assert [layer.cache.token_bytes("bfloat16") for layer in sizes.layers] == [576 * 2] * 61
    assert [layer.cache.token_bytes("int8") for layer in sizes.layers] == [576 + 4] * 61
    layer = sizes.layers[3]
    assert layer.context_flops == 2 * 128 * (512 + 64) + 2 * 128 * 512
    assert layer.feed_forward_flops == 2 * (256 * 7168 + 9 * 3 * 7168 * 2048)
    flops = sizes.head_flops + sum(layer.attention.flops + layer.feed_forward_flops for layer in sizes.layers)
    assert flops == pytest.approx(2 * (sizes.active_parameters - sizes.embedding.parameters), rel=1e-4)


def test_windows_and_states_bound_a_row(tmp_path: Path) -> None:
    """A windowed layer keeps its window, a recurrent one its state and nothing of a token."""
    CONFIG_MAPPING["gpt_oss"](**FAMILIES["gpt_oss"][0]).save_pretrained(tmp_path)
    sizes = model_sizes(load_config(str(tmp_path)))
    numbers = 2 * 2 * 24
    assert sizes.layers[0].cache == Cache(values=numbers, heads=4, window=128)
    assert [layer.cache.window for layer in sizes.layers] == [128, None, 128, None]
    assert {layer.cache.token_bytes("bfloat16") for layer in sizes.layers} == {2 * numbers}
    assert {layer.cache.token_bytes("int8") for layer in sizes.layers} == {numbers + 4 * 4}
    CONFIG_MAPPING["kimi_linear"](**FAMILIES["kimi_linear"][0]).save_pretrained(tmp_path)
    sizes = model_sizes(load_config(str(tmp_path)))
    state = 3 * 16 * 16 + 3 * 3 * 16 * 3
    assert [layer.cache.state for layer in sizes.layers] == [state, state, 0, state]
    assert [layer.cache.token_bytes("bfloat16") for layer in sizes.layers] == [0, 0, 32 * 2, 0]


def quantised(values: dict[str, object]) -> Quantization:
    """What a file with this `quantization_config` says."""
    found = read_quantization(JsonObject({"quantization_config": values}, "config.json"), None)
    assert found is not None
    return found


def packed(form: str, **weights: object) -> dict[str, object]:
    """A `quantization_config` of compressed-tensors."""
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(("values", "stored"), [
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 576 * 200 + 5 * 2 * 4),
    ({"quant_method": "fp8"}, 576 * 200 + 4),
    ({"quant_method": "fp8", "activation_scheme": "static"}, 576 * 200 + 4 + 4),
    ({"quant_method": "mxfp4"}, 576 * (100 + 7)),
    (packed("pack-quantized", num_bits=4, strategy="group", group_size=32), 576 * (25 * 4 + 7 * 2) + 16),
    (packed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
     576 * (25 * 4 + 7 * 2) + 16 + 72 * 7 * 4),
    (packed("float-quantized", num_bits=8, type="float", strategy="channel"), 576 * 202),
    (packed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32), 576 * (100 + 7)),
])
def test_stored_bytes_of_a_ragged_matrix(values: dict[str, object], stored: int) -> None:
    """Started blocks and words count whole: a weight [576, 200]."""
    assert matrix_bytes(quantised(values), 576, 200) == stored


def test_exceptions_of_a_file_stay_plain(tmp_path: Path) -> None:
    """Kimi-K2.5 packs routed experts only: attention, shared experts and dense layers are bfloat16."""
    ignored = ["re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*", "lm_head"]
    sizes, form = r1(tmp_path, quantization_config={
        **packed("pack-quantized", num_bits=4, strategy="group", group_size=32), "ignore": ignored})
    first, last = sizes.layers[0], sizes.layers[-1]
    assert first.bytes(form) == first.bytes(BFLOAT16)
    assert last.shared.bytes(form) == last.shared.bytes(BFLOAT16)
    assert last.expert.bytes(form) == 3 * 2048 * 7168 // 2 + 2 * 3 * 2048 * 7168 // 32 + 3 * 16


def test_only_the_experts_of_gpt_oss_are_mxfp4(tmp_path: Path) -> None:
    """Attention and router stay bfloat16; an expert has 17 bytes for 32 weights, and its biases."""
    values = {**FAMILIES["gpt_oss"][0], "quantization_config": {
        "quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss", **values}))
    config = load_config(str(tmp_path))
    layer, form = model_sizes(config).layers[0], WeightForm(dtype="bfloat16", stored=config.quantization)
    assert layer.attention.bytes(form) == layer.attention.bytes(BFLOAT16)
    assert layer.router.bytes(form) == layer.router.bytes(BFLOAT16)
    assert layer.expert.bytes(form) == 96 * 2 * 17 + 64 * (24 + 2) + 2 * (96 + 64)
