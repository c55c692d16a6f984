"""Laws of reading how weights are quantised: what can be read is read exactly, all else is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchgen_beam.config.model_registry import load_config
from batchgen_beam.config.quantization import Quantization, Storage
from batchgen_beam.errors import CheckpointError


def load(folder: Path, key: str = "quantization_config", **values: object) -> Quantization | None:
    """The quantization that a Llama's config.json with these values has."""
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", key: values}))
    return load_config(str(folder)).quantization


def compressed(form: str, bits: int, kind: str, **weights: object) -> dict[str, Any]:
    """A compressed-tensors description with one group."""
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind, **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def int4(**weights: object) -> dict[str, Any]:
    """INT4 in groups of 32."""
    return compressed("pack-quantized", 4, "int", **{"strategy": "group", "group_size": 32, **weights})


@pytest.mark.parametrize(("values", "storage", "block"), [
    ({"quant_method": "fp8", "weight_block_size": [128, 64], "fmt": "e4m3"}, Storage.FP8, (128, 64)),
    ({"quant_method": "fp8", "weight_block_size": None}, Storage.FP8, (None, None)),
    ({"quant_method": "mxfp4"}, Storage.MXFP4_EXPERTS, (1, 32)),
    (int4(), Storage.INT4, (1, 32)),
    (int4(group_size=128), Storage.INT4, (1, 128)),
    (int4(strategy="channel", group_size=None), Storage.INT4, (1, None)),
    (compressed("mxfp4-pack-quantized", 4, "float", strategy="group", group_size=32), Storage.MXFP4, (1, 32)),
    (compressed("float-quantized", 8, "float", strategy="channel"), Storage.FP8, (1, None)),
    (compressed("float-quantized", 8, "float", strategy="tensor"), Storage.FP8, (None, None)),
    (compressed("float-quantized", 8, "float", strategy="block", block_structure=[128, 128]), Storage.FP8, (128, 128)),
])
def test_what_can_be_read(tmp_path: Path, values: dict[str, Any], storage: Storage, block: object) -> None:
    """Storage, and which rows and columns share a scale, are what the file says."""
    found = load(tmp_path, **values)
    assert found is not None
    assert (found.storage, found.block, found.is_symmetric) == (storage, block, True)
    assert load(tmp_path, "compression_config", **values) == found


def test_plain_files_have_none(tmp_path: Path) -> None:
    """No description, or an empty one, means plain weights."""
    assert load(tmp_path) is None
    (tmp_path / "config.json").write_text('{"model_type": "llama", "quantization_config": null}')
    assert load_config(str(tmp_path)).quantization is None


def test_nested_in_the_text_part(tmp_path: Path) -> None:
    """Kimi-K2.5 describes its INT4 experts inside `text_config`."""
    (tmp_path / "config.json").write_text(json.dumps(
        {"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2", "quantization_config": int4()}}))
    found = load_config(str(tmp_path)).quantization
    assert found is not None
    assert found.storage is Storage.INT4


@pytest.mark.parametrize(("values", "message"), [
    ({"quant_method": "awq", "bits": 4}, "quantised by 'awq', which can't be read; use the model's unquantised"),
    ({"quant_method": "gptq"}, "quantised by 'gptq'"),
    ({"quant_method": "bitsandbytes"}, "quantised by 'bitsandbytes'"),
    ({"bits": 4}, "quantised by 'unnamed method'"),
    ({"quant_method": 3}, "quant_method must be text"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "'fp8' of fmt 'e5m2'"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must hold two sizes"),
    ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size must hold two sizes"),
    (compressed("nvfp4-pack-quantized", 4, "float"), "format 'nvfp4-pack-quantized' with 4-bit float weights"),
    (compressed("int-quantized", 8, "int"), "format 'int-quantized'"),
    (int4(num_bits=8), "format 'pack-quantized' with 8-bit int weights"),
    (int4(actorder="group"), "activation order 'group'"),
    (int4(strategy="tensor"), "by strategy 'tensor'"),
    (int4(group_size=None), "group_size None has no meaning"),
    (compressed("mxfp4-pack-quantized", 4, "float", strategy="group", group_size=16), "group_size 16 has no meaning"),
    (compressed("float-quantized", 8, "float", strategy="channel", symmetric=False), "symmetric false has no meaning"),
    (int4() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse or transformed weights"),
    (int4() | {"config_groups": {}}, "config_groups must say"),
    (int4() | {"config_groups": {"a": int4()["config_groups"]["group_0"], "b": {"weights": {"num_bits": 8}}}},
     "several ways at once"),
    (int4() | {"ignore": ["re:("]}, r"ignore: '\(' is no pattern"),
])
def test_what_is_refused(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    """Any other method, format or number is refused by name, with the file and what to do."""
    with pytest.raises(CheckpointError, match=rf"config\.json: quantization_config.*{message}"):
        load(tmp_path, **values)


@pytest.mark.parametrize(("entries", "module", "entry"), [
    (["lm_head"], "lm_head", "lm_head"),
    (["lm_head"], "language_model.lm_head", "lm_head"),
    (["model.layers.1"], "model.layers.1.mlp.up_proj", "model.layers.1"),
    (["model.layers.1"], "model.layers.11.mlp.up_proj", None),
    (["model.layers.0.mlp.gate"], "model.layers.0.mlp.gate_proj", None),
    (["gate"], "model.layers.0.mlp.gate", "gate"),
    (["model.layers.*.self_attn"], "model.layers.3.self_attn.q_proj", r"(?:model.layers.*.self_attn)(?:\.|$)"),
    (["model.layers.*.self_attn"], "model.layers.3.mlp.up_proj", None),
    (["re:.*self_attn.*"], "model.layers.3.self_attn.q_proj", ".*self_attn.*"),
    ([r"re:.*mlp\.(gate|up|down)_proj.*"], "model.layers.1.mlp.experts.0.up_proj", None),
    ([r"re:mlp"], "model.layers.1.mlp", None),
])
def test_plain_modules(tmp_path: Path, entries: list[str], module: str, entry: str | None) -> None:
    """Names mean whole parts of a module's name from either end; `re:` and `*` are patterns from its beginning."""
    for values in (int4(ignore=entries) | {"ignore": entries},
                   {"quant_method": "fp8", "modules_to_not_convert": entries}):
        found = load(tmp_path, **values)
        assert found is not None
        assert found.plain_modules.entry_of(module) == entry
