"""Cases about checkpoints: what must be refused before a run, by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from batchgen_beam.config.families.llama import LlamaConfig
from batchgen_beam.config.families.qwen import Qwen2Config
from batchgen_beam.config.model_registry import load_config
from batchgen_beam.errors import CheckpointError, OptionError
from batchgen_beam.settings import EngineSettings
from batchgen_beam.weights.checkpoint import check_checkpoint
from tests.weights.tiny_checkpoint import edit_index, tensors, write_config, write_shards, write_single

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def test_missing_shard(tmp_path: Path) -> None:
    """Case 41: a file named in the index and absent is refused by name; nothing runs on uninitialised weights."""
    folder = write_shards(tmp_path, tensors())
    assert len(check_checkpoint(folder).tensors) == 21
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 3 files .*model-00002-of-00003\.safetensors"):
        check_checkpoint(folder)


def test_shards_without_index(tmp_path: Path) -> None:
    """Case 41: shards whose index is absent are refused, also when only one of them is left."""
    folder = write_shards(tmp_path, tensors())
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors\.index\.json"):
        check_checkpoint(folder)
    for shard in ("00002", "00003"):
        (folder / f"model-{shard}-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors\.index\.json"):
        check_checkpoint(folder)


def test_index_and_files_disagree(tmp_path: Path) -> None:
    """Case 41: a tensor in the index and not in its file, and the other way round, is refused by name."""
    folder = write_shards(tmp_path, tensors())
    edit_index(folder, {"model.layers.9.ghost": "model-00001-of-00003.safetensors"})
    with pytest.raises(CheckpointError, match=r"file does not hold: model\.layers\.9\.ghost"):
        check_checkpoint(folder)
    edit_index(folder, {"model.layers.9.ghost": None, "model.norm.weight": None})
    with pytest.raises(CheckpointError, match=r"does not name tensors that the files hold: model\.norm\.weight"):
        check_checkpoint(folder)


def test_tied_without_head(tmp_path: Path) -> None:
    """Case 43: tied and absent: the embeddings are used."""
    facts = check_checkpoint(write_single(tmp_path, tensors(head=False), tie_word_embeddings=True))
    assert "head" not in facts.tensors
    assert facts.ignored == ()


def test_tied_with_equal_head(tmp_path: Path) -> None:
    """Case 43: tied and present with the same bytes: listed as ignored."""
    stored = tensors()
    stored[HEAD] = stored[EMBEDDING].clone()
    facts = check_checkpoint(write_shards(tmp_path, stored, tie_word_embeddings=True))
    assert "head" not in facts.tensors
    assert facts.ignored == (HEAD,)


@pytest.mark.parametrize("change", ["value", "dtype"])
def test_tied_with_another_head(tmp_path: Path, change: str) -> None:
    """Case 43: tied and present but different, in one value or in its number format: refused."""
    stored = tensors()
    stored[HEAD] = stored[EMBEDDING].clone() if change == "value" else stored[EMBEDDING].to(torch.bfloat16)
    if change == "value":
        stored[HEAD][-1, -1] += 1
    with pytest.raises(CheckpointError, match=r"lm_head\.weight .*differs.*tie_word_embeddings true"):
        check_checkpoint(write_single(tmp_path, stored, tie_word_embeddings=True))


@pytest.mark.parametrize("flag", [False, None])
def test_untied_without_head(tmp_path: Path, flag: bool | None) -> None:
    """Case 43: untied (or silent, which is untied for Llama) and absent: refused, with the disagreement explained."""
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is absent, and config\.json does not set tie_word"):
        check_checkpoint(write_single(tmp_path, tensors(head=False), tie_word_embeddings=flag))


def test_untied_with_head(tmp_path: Path) -> None:
    """Case 43: untied and present: it is a parameter of its own."""
    assert check_checkpoint(write_single(tmp_path, tensors())).tensors["head"].name == HEAD


@pytest.mark.parametrize(("said", "message"), [
    (3, r"says 3 layers, the files hold 2: missing layers \[2\]"),
    (1, r"says 1 layers, the files hold 2: missing layers \[\], too many \[1\]"),
])
def test_layer_count(tmp_path: Path, said: int, message: str) -> None:
    """Case 44: config.json says another number of layers than the files hold."""
    with pytest.raises(CheckpointError, match=message):
        check_checkpoint(write_single(tmp_path, tensors(), num_hidden_layers=said))


def test_unfilled_and_unknown(tmp_path: Path) -> None:
    """Case 44: every parameter is filled and every stored name has a use, or both are named."""
    stored = tensors()
    stored["model.layers.1.self_attn.q_norm.weight"] = torch.ones(2)
    del stored["model.layers.0.mlp.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"1 missing \(model\.layers\.0\.mlp\.up_proj\.weight\), 1 unknown "
                                              r"\(model\.layers\.1\.self_attn\.q_norm\.weight\)"):
        check_checkpoint(write_single(tmp_path, stored))


def test_one_unfilled_parameter(tmp_path: Path) -> None:
    """Case 44: one absent tensor of one layer is enough to refuse the folder."""
    stored = tensors()
    del stored["model.layers.1.input_layernorm.weight"]
    with pytest.raises(CheckpointError, match=r"1 missing \(model\.layers\.1\.input_layernorm\.weight\), 0 unknown"):
        check_checkpoint(write_single(tmp_path, stored))


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "fbgemm_fp8", "modelopt", "quark", "hqq"])
def test_quantised_by_method(tmp_path: Path, method: str) -> None:
    """Case 45: the method in config.json is refused by name before any file is looked at."""
    folder = write_config(tmp_path, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(CheckpointError, match=f"quantised by '{method}', which can't be read; use the model's"):
        check_checkpoint(folder)


@pytest.mark.parametrize(("dtype", "word"), [
    (torch.float8_e4m3fn, "F8_E4M3"), (torch.uint8, "U8"), (torch.int32, "I32"), (torch.float64, "F64"),
])
@pytest.mark.parametrize("scale", [False, True])
def test_quantised_by_dtype(tmp_path: Path, dtype: torch.dtype, word: str, scale: bool) -> None:
    """Case 45: a weight of another number format and no method in config.json is refused by its name, with or
    without a scale beside it; it is never cast as if it were plain."""
    name = "model.layers.0.mlp.up_proj.weight"
    stored = tensors()
    stored[name] = torch.ones(stored[name].shape).to(dtype)
    if scale:
        stored[f"{name}_scale_inv"] = torch.ones(1, 1)
    with pytest.raises(CheckpointError, match=rf"{name} in .* is stored as {word} with"):
        check_checkpoint(write_single(tmp_path, stored))


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_rope_keys(tmp_path: Path, key: str) -> None:
    """Case 46: both keys of the rope's kind are read, and none is ignored."""
    folder = write_single(tmp_path, tensors(), rope_scaling={key: "linear", "factor": 2.0})
    config = check_checkpoint(folder).config
    assert isinstance(config, LlamaConfig)
    assert (config.rope.rope_type, config.rope.factor) == ("linear", 2.0)


@pytest.mark.parametrize(("scaling", "message"), [
    ({"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}, "'longrope' is not supported"),
    ({"rope_type": "mrope", "mrope_section": [1]}, "'mrope' is not supported"),
    ({"type": "yarn", "rope_type": "linear", "factor": 2.0}, "disagree"),
    ({"type": "yarn", "factor": 2.0, "original_length": 32}, "'original_length' has no meaning"),
])
def test_rope_kinds(tmp_path: Path, scaling: dict[str, object], message: str) -> None:
    """Case 46: unknown kinds, unknown keys and contradictions are refused."""
    with pytest.raises(CheckpointError, match=message):
        check_checkpoint(write_single(tmp_path, tensors(), rope_scaling=scaling))


@pytest.mark.parametrize("dtype", ["bf16", "float16", "fp8", "", "BFLOAT16"])
def test_option_values(dtype: str) -> None:
    """Case B10: an unknown number format is refused by name, with the allowed ones."""
    with pytest.raises(OptionError, match=f"dtype '{dtype}' is unknown; use one of bfloat16, float32"):
        EngineSettings(dtype=dtype)
    with pytest.raises(OptionError, match=f"kv_dtype '{dtype}' is unknown; use one of auto, int8"):
        EngineSettings(kv_dtype=dtype)


def test_own_config_decides(tmp_path: Path) -> None:
    """Case B12: a folder's own config.json decides, whatever pattern its name matches; the bare name is Qwen2."""
    folder = write_single(tmp_path / "DeepSeek-R1", tensors())
    assert type(check_checkpoint(folder).config) is LlamaConfig
    assert type(load_config("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B")) is Qwen2Config
    other = write_config(tmp_path / "Llama-3.1-8B", model_type="deepseek_v32")
    with pytest.raises(CheckpointError, match=r"config known, model not supported yet .*'deepseek_v32'"):
        check_checkpoint(other)
