"""Laws of quantised checkpoints: what is loaded is the dequantised values, and each fault is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from batchgen_beam.config.families.llama import LlamaConfig
from batchgen_beam.config.model_registry import load_config
from batchgen_beam.errors import CheckpointError
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.weights import loader, quantized_reader
from batchgen_beam.weights.checkpoint import check_checkpoint
from batchgen_beam.weights.identity import weights_identity
from batchgen_beam.weights.loader import load_model
from batchgen_beam.weights.name_tables import expected_parameters
from tests.weights.convert_until import CountingPacking, copy_plan
from tests.weights.quantized_tensors import FORMS, GPT_OSS_EXPERTS, Form, fp8

SIZES: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "vocab_size": 40, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "eos_token_id": 1, "rope_theta": 10000.0}
DEEPSEEK = SIZES | {
    "model_type": "deepseek_v3", "num_hidden_layers": 2, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 40, "first_k_dense_replace": 1, "num_key_value_heads": 4}
KIMI = DEEPSEEK | {"model_type": "kimi_k2", "moe_intermediate_size": 32}
GPT_OSS = SIZES | {"model_type": "gpt_oss", "num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 32,
                   "sliding_window": 8, "layer_types": ["sliding_attention"], "rope_scaling": None}
MODELS = {"llama": "LlamaModel", "deepseek_v3": "DeepseekModel", "kimi_k2": "DeepseekModel", "gpt_oss": "GptOssModel"}
UP = "model.layers.0.mlp.up_proj.weight"


def save(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Path:
    """config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def shapes(folder: Path, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The stored tensors that a model of this configuration has, unquantised."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    parameters = expected_parameters(load_config(str(folder)))
    return {parameter.stored: parameter.stored_shape or parameter.shape for parameter in parameters}


def is_linear(name: str) -> bool:
    """Weights that are usually quantised."""
    return "proj" in name and name.endswith(".weight")


def make(folder: Path, config: Mapping[str, Any], form: Form,
         chosen: Callable[[str], bool] = is_linear) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Stored tensors, those `chosen` quantised, and all tensors dequantised."""
    generator = torch.Generator().manual_seed(1)
    stored, plain = {}, {}
    for name, shape in shapes(folder, config).items():
        if chosen(name):
            parts, plain[name] = form.make(shape, generator)  # type: ignore[arg-type]
            stored |= {name + end: part for end, part in parts.items()}
        else:
            stored[name] = plain[name] = torch.randn(shape, generator=generator)
    return stored, plain


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> dict[str, Tensor]:
    """All parameters by name, as the model is given them."""
    def record(config: Any, get: Callable[[str], Tensor], kernels: object) -> dict[str, Tensor]:
        return {name: get(name) for name in check_checkpoint(folder).parameters}

    monkeypatch.setattr(loader, MODELS[json.loads((folder / "config.json").read_text())["model_type"]], record)
    found: Any = load_model(folder, TorchKernels(dtype))
    return dict(found)


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """The same parameters in the same number formats, bit for bit."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize(("dtype", "piece"), [(torch.float32, 1 << 22), (torch.bfloat16, 600)])
@pytest.mark.parametrize("name", FORMS)
def test_loads_as_the_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype,
                                  piece: int) -> None:
    """Each storage loads bit for bit as the checkpoint of its float32 values does, in one piece or in several, and the
    model is built of it."""
    monkeypatch.setattr(quantized_reader, "PIECE", piece)
    stored, plain = make(tmp_path / "q", SIZES, FORMS[name])
    quantised = save(tmp_path / "q", stored, SIZES | {"quantization_config": FORMS[name].config})
    whole = save(tmp_path / "p", plain, SIZES)
    load_model(quantised, TorchKernels(dtype))
    assert_same(loaded(quantised, monkeypatch, dtype), loaded(whole, monkeypatch, dtype))
    facts = check_checkpoint(quantised)
    assert facts.stored_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert facts.ignored == ()


@pytest.mark.parametrize(("config", "name", "chosen"), [
    (DEEPSEEK, "fp8 ragged blocks", is_linear),
    (KIMI, "int4", lambda name: ".mlp.experts." in name),
])
def test_latent_attention_and_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any],
                                      name: str, chosen: Callable[[str], bool]) -> None:
    """DeepSeek-V3 in FP8 blocks, cut off at 24 rows, and Kimi-K2's experts in INT4 load as their values do."""
    stored, plain = make(tmp_path / "q", config, FORMS[name], chosen)
    quantised = save(tmp_path / "q", stored, config | {"quantization_config": FORMS[name].config})
    load_model(quantised, TorchKernels(torch.float32))
    assert_same(loaded(quantised, monkeypatch, torch.float32),
                loaded(save(tmp_path / "p", plain, config), monkeypatch, torch.float32))


def test_gpt_oss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-OSS in MXFP4 loads as its values do, expert by expert; biases stay plain."""
    stored, plain = make(tmp_path / "q", GPT_OSS, GPT_OSS_EXPERTS, lambda name: name.endswith("_proj"))
    quantised = save(tmp_path / "q", stored, GPT_OSS | {"quantization_config": GPT_OSS_EXPERTS.config})
    load_model(quantised, TorchKernels(torch.float32))
    assert_same(loaded(quantised, monkeypatch, torch.float32),
                loaded(save(tmp_path / "p", plain, GPT_OSS), monkeypatch, torch.float32))


def test_scales_of_activations_are_not_read(tmp_path: Path) -> None:
    """Static scales of activations are listed as ignored, but only beside quantised weights that may have them."""
    form = FORMS["fp8 one scale"]
    stored, _ = make(tmp_path, SIZES, form)
    stored[UP.replace(".weight", ".activation_scale")] = torch.tensor(1.0)
    config = SIZES | {"quantization_config": form.config | {"activation_scheme": "static"}}
    assert check_checkpoint(save(tmp_path, stored, config)).ignored == (UP.replace(".weight", ".activation_scale"),)
    with pytest.raises(CheckpointError, match=r"up_proj\.activation_scale in .* is part of a quantised"):
        check_checkpoint(save(tmp_path, stored, SIZES | {"quantization_config": form.config}))


def drop(*ends: str) -> Callable[[dict[str, Tensor]], None]:
    """Take parts of one weight away."""
    def change(stored: dict[str, Tensor]) -> None:
        for end in ends:
            del stored[UP + end]
    return change


def put(**parts: Tensor) -> Callable[[dict[str, Tensor]], None]:
    """Replace or add parts of one weight."""
    return lambda stored: stored.update({UP + end: part for end, part in parts.items()})


def swap(one: str, other: str) -> Callable[[dict[str, Tensor]], None]:
    """Exchange two tensors."""
    def change(stored: dict[str, Tensor]) -> None:
        stored[one], stored[other] = stored[other], stored[one]
    return change


DOWN = UP.replace("up", "down")
FAULTS = [
    ("fp8 ragged blocks", drop("_scale_inv"), rf"{UP} in .* is quantised \(F8_E4M3\) and its scale {UP}_scale_inv"),
    ("fp8 ragged blocks", drop(""), rf"{UP}_scale_inv in .* is part of a quantised {UP}, which is not stored"),
    ("fp8 ragged blocks", put(**{"": torch.ones(96, 64)}), rf"{UP}_scale_inv in .* {UP}, which is stored plain"),
    ("fp8 ragged blocks", put(_scale=torch.ones(1)), rf"{UP} .* has two scales"),
    ("fp8 ragged blocks", put(_scale_inv=torch.ones(3, 2)), rf"{UP}_scale_inv in .* is F32 \[3, 2\].* \[2, 2\]"),
    ("fp8 ragged blocks", put(_scale_inv=torch.ones(2, 2, dtype=torch.float64)), r"_scale_inv in .* is F64 \[2, 2\]"),
    ("fp8 ragged blocks", swap(UP + "_scale_inv", DOWN + "_scale_inv"), r"_scale_inv in .* is F32 \[\d, \d\]; to give"),
    ("fp8 ragged blocks", put(**{"": torch.ones(96, 64, dtype=torch.int8)}), rf"{UP}_scale_inv|stored as I8"),
    ("fp8 ragged blocks", lambda stored: stored.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}),
     r"model\.norm\.weight in .* is stored as I32, which is neither plain"),
    ("fp8 ragged blocks", lambda stored: stored.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn),
                                                        "model.norm.weight_scale_inv": torch.ones(1)}),
     r"model\.norm\.weight in .* is quantised, but .* has the shape \[64\]"),
    ("float-quantized channel", put(_scale=torch.ones(64, 1)), rf"{UP}_scale in .* \[64, 1\].*\[96, 1\]"),
    ("float-quantized tensor", put(_scale=torch.ones(96, 1)), rf"{UP}_scale in .* \[96, 1\].*\[1, 1\]"),
    ("int4", drop("_scale"), rf"{UP}_packed in .* and its scale {UP}_scale is absent"),
    ("int4", drop("_packed"), rf"{UP}_(scale|shape) in .* {UP}, which is not stored"),
    ("int4", drop("_shape"), rf"{UP}_packed in .* its {UP}_shape is absent"),
    ("int4", put(_shape=torch.tensor([64, 96])), rf"{UP}_shape in .* says \[64, 96\], config\.json asks for \[96, "),
    ("int4", put(_zero_point=torch.zeros(12, 2, dtype=torch.int32)),
     rf"{UP}_zero_point in .* {UP}, which has no such part by config\.json"),
    ("int4", put(**{"": torch.ones(96, 64)}), rf"{UP} in .* is stored plain, and quantised too as {UP}_packed"),
    ("int4", put(_packed=torch.ones(96, 7, dtype=torch.int32)), rf"{UP}_packed in .* I32 \[96, 7\].*\[96, 8\]"),
    ("int4", put(_packed=torch.ones(96, 8, dtype=torch.uint8)), rf"{UP}_packed in .* U8 \[96, 8\].* has to be I32"),
    ("int4", swap(UP + "_packed", UP + "_scale"), rf"{UP}_packed in .* is BF16"),
    ("int4 zero points", drop("_zero_point"), rf"{UP}_packed in .* its {UP}_zero_point is absent"),
    ("int4 zero points", put(_zero_point=torch.zeros(12, 3, dtype=torch.int32)), rf"{UP}_zero_point in .* \[12, 4\]"),
    ("mxfp4", drop("_scale"), rf"{UP}_packed in .* and its scale {UP}_scale is absent"),
    ("mxfp4", put(_scale=torch.ones(96, 2)), rf"{UP}_scale in .* is F32 \[96, 2\].*U8 or F8_E8M0"),
]


@pytest.mark.parametrize(("name", "change", "message"), FAULTS, ids=[f"{f[0]}: {f[2]}" for f in FAULTS])
def test_faults_are_named(tmp_path: Path, name: str, change: Callable[[dict[str, Tensor]], None],
                          message: str) -> None:
    """A part that is missing, swapped, too many, or of another shape or number format is refused by its name."""
    stored, _ = make(tmp_path, SIZES, FORMS[name])
    change(stored)
    with pytest.raises(CheckpointError, match=message):
        check_checkpoint(save(tmp_path, stored, SIZES | {"quantization_config": FORMS[name].config}))


def test_stored_quantised_although_listed_as_plain(tmp_path: Path) -> None:
    """A weight that config.json lists among the unquantised ones and that is stored quantised is refused."""
    stored, _ = make(tmp_path, SIZES, FORMS["fp8 ragged blocks"])
    config = SIZES | {"quantization_config": fp8([48, 40]) | {"modules_to_not_convert": ["lm_head", "up_proj"]}}
    with pytest.raises(CheckpointError, match=rf"{UP} in .* quantised \(F8_E4M3\), but config\.json lists 'up_proj'"):
        check_checkpoint(save(tmp_path, stored, config))


def test_mxfp4_needs_whole_groups(tmp_path: Path) -> None:
    """Inputs that are no multiple of 32 have no MXFP4 form."""
    config = SIZES | {"intermediate_size": 80, "quantization_config": FORMS["mxfp4"].config}
    stored, _ = make(tmp_path, config, FORMS["mxfp4"], lambda name: name == DOWN)
    with pytest.raises(CheckpointError, match=r"has 80 inputs by config\.json, and compressed-tensors mxfp4.* of 32"):
        check_checkpoint(save(tmp_path, stored, config))


@pytest.mark.parametrize("end", ["", "_scale_inv"])
def test_identity_is_of_quantised_bytes_too(tmp_path: Path, end: str) -> None:
    """Another number, or another scale, is another model."""
    stored, _ = make(tmp_path, SIZES, FORMS["fp8 ragged blocks"])
    config = SIZES | {"quantization_config": FORMS["fp8 ragged blocks"].config}
    first = weights_identity(save(tmp_path, stored, config))
    stored[UP + end].view(torch.uint8)[-1, -1] ^= 1
    assert weights_identity(save(tmp_path, stored, config)) != first


def test_another_reading_of_the_same_bytes_is_another_packed_copy(tmp_path: Path) -> None:
    """When config.json is corrected, a copy of the numbers that were read wrongly is not taken for theirs."""
    stored, _ = make(tmp_path, SIZES, FORMS["fp8 ragged blocks"])
    configs = [SIZES | {"quantization_config": fp8(blocks)} for blocks in ([48, 40], [50, 40])]
    names = {copy_plan(save(tmp_path, stored, config), CountingPacking()).folder_name for config in configs}
    assert len(names) == 2


def test_plain_model_keeps_its_class(tmp_path: Path) -> None:
    """The configuration of a quantised checkpoint is its family's, with how weights are stored."""
    stored, _ = make(tmp_path, SIZES, FORMS["int4"])
    config = check_checkpoint(save(tmp_path, stored, SIZES | {"quantization_config": FORMS["int4"].config})).config
    assert type(config) is LlamaConfig
    assert config.quantization is not None
