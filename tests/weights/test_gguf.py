"""GGUF files become checkpoint folders, or are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file

from batchgen_beam.errors import CheckpointError
from batchgen_beam.weights.checkpoint import check_checkpoint
from batchgen_beam.weights.gguf import convert
from batchgen_beam.weights.gguf_metadata import GgufHyperparameters, read_metadata
from batchgen_beam.weights.gguf_rope import rope_scaling_json
from tests.weights.gguf_files import (
    HEAD_SIZE,
    KV_HEADS,
    VOCABULARY,
    WIDTH,
    Tensors,
    file_tensors,
    hub_tensors,
    metadata,
    write_gguf,
)

F32 = GGMLQuantizationType.F32


def converted(tmp_path: Path, tensors: Tensors, keys: dict[str, Any] | None = None,
              kind: GGMLQuantizationType = F32) -> tuple[dict[str, Any], Tensors]:
    """config.json and the tensors of a converted file."""
    folder = tmp_path / "folder"
    convert(write_gguf(tmp_path / "model.gguf", tensors, keys, kind=kind), folder)
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("biases", [True, False])
def test_float_tensors_come_back_as_they_were(tied: bool, biases: bool, tmp_path: Path) -> None:
    """Names and rows are the hub's again, those of Q and K (weights and biases) too; the folder is valid."""
    hub = hub_tensors(tied=tied, biases=biases)
    config, found = converted(tmp_path, file_tensors(hub))
    assert found.keys() == hub.keys()
    for name, tensor in hub.items():
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)
    assert (config["tie_word_embeddings"], config["attention_bias"], config["mlp_bias"]) == (tied, biases, biases)
    check_checkpoint(tmp_path / "folder")


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0, GGMLQuantizationType.F16,
                                  GGMLQuantizationType.BF16])
def test_quantised_tensors_are_dequantised_once(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    """Each stored value is the file's value as float32: picking rows before dequantising changes nothing."""
    hub = hub_tensors()
    _, found = converted(tmp_path, file_tensors(hub), kind=kind)
    for name, tensor in hub.items():
        expected = tensor if tensor.ndim == 1 else dequantize(quantize(tensor, kind), kind)
        np.testing.assert_array_equal(found[name], expected, err_msg=name)


def test_the_configuration_is_in_the_hubs_spelling(tmp_path: Path) -> None:
    """Sizes, base, epsilon (the decimal that was meant) and all ids that end an answer are in config.json."""
    config, _ = converted(tmp_path, file_tensors(hub_tensors()), metadata(tokenizer__ggml__eot_token_id=7))
    assert config == {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": WIDTH,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE, "max_position_embeddings": 128, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "rope_scaling": None, "tie_word_embeddings": True, "attention_bias": False,
        "mlp_bias": False, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": [2, 7]}


def test_metadata_are_plain_values(tmp_path: Path) -> None:
    """Tokenizer lists and flags come as Python values; what the file does not say is None or empty."""
    found = read_metadata(write_gguf(tmp_path / "m.gguf", {}, metadata(general__name="little")))
    assert (found.name, found.hyperparameters.head_size) == ("little", HEAD_SIZE)
    tokenizer = found.tokenizer
    assert (tokenizer.pre, tokenizer.tokens[3], tokenizer.token_types[3]) == ("smollm", "t3", 1)
    assert (tokenizer.merges, tokenizer.scores) == (("t 0", "t 1"), ())
    assert tokenizer.add_bos is False
    assert (tokenizer.chat_template, tokenizer.eot_id) == (None, None)
    assert tokenizer.end_ids == (2,)


def llama3_factors(rope: tuple[float, float, float, int], head_size: int, theta: float) -> np.ndarray:
    """What the converter stores for llama3 rope, frequency by frequency (Llama 3.1 reference code)."""
    factor, low, high, original = rope
    found = []
    for i in range(0, head_size, 2):
        wavelength = 2 * np.pi * theta ** (i / head_size)
        smooth = (original / wavelength - low) / (high - low)
        smooth = 1.0 if wavelength < original / high else 0.0 if wavelength > original / low else smooth
        found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, dtype=np.float32)


@pytest.mark.parametrize("rope", [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (8.0, 2.0, 32.0, 4096)])
@pytest.mark.parametrize("head_size", [64, 128])
def test_frequency_factors_become_llama3_rope(rope: tuple[float, float, float, int], head_size: int) -> None:
    """The factors of Llama 3.1 and 3.2 give their own numbers back; only ratios count, so low_freq_factor becomes 1."""
    factor, low, high, original = rope
    hyper = GgufHyperparameters(context_length=131072, embedding_length=2048, block_count=1, feed_forward_length=1,
                                head_count=32, head_count_kv=8, head_size=head_size, rms_epsilon=1e-5,
                                rope_theta=500000.0, rope_scaling=None)
    assert rope_scaling_json(hyper, llama3_factors(rope, head_size, 500000.0), Path("m.gguf")) == {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": high / low,
        "original_max_position_embeddings": original // low}


def test_the_tensor_of_frequency_factors_is_read(tmp_path: Path) -> None:
    """`rope_freqs.weight` becomes part of config.json and is no tensor of the checkpoint."""
    factors = llama3_factors((8.0, 2.0, 32.0, 4096), HEAD_SIZE, 10000.0)
    config, found = converted(tmp_path, file_tensors(hub_tensors()) | {"rope_freqs.weight": factors})
    assert config["rope_scaling"]["high_freq_factor"] == 16.0
    assert found.keys() == hub_tensors().keys()


def test_other_frequency_factors_are_refused(tmp_path: Path) -> None:
    """Factors of another formula, or beside a rope scaling, are refused."""
    factors = np.array([1, 1, 1.5, 2.5, 3, 7, 8, 8], dtype=np.float32)
    path = write_gguf(tmp_path / "a.gguf", file_tensors(hub_tensors()) | {"rope_freqs.weight": factors})
    with pytest.raises(CheckpointError, match=r"a\.gguf: rope_freqs\.weight is not of llama3"):
        convert(path, tmp_path / "folder")
    keys = metadata(llama__rope__scaling__type="linear", llama__rope__scaling__factor=2.0)
    path = write_gguf(tmp_path / "b.gguf", file_tensors(hub_tensors()) | {"rope_freqs.weight": factors}, keys)
    with pytest.raises(CheckpointError, match="together with rope_freqs"):
        convert(path, tmp_path / "folder")


@pytest.mark.parametrize(("keys", "expected"), [
    ({"llama__rope__scaling__type": "none"}, None),
    ({"llama__rope__scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 2.0},
     {"rope_type": "linear", "factor": 2.0}),
    ({"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0,
      "llama__rope__scaling__original_context_length": 32},
     {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}),
    ({"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0,
      "llama__rope__scaling__original_context_length": 32, "llama__rope__scaling__attn_factor": 0.5,
      "llama__rope__scaling__yarn_beta_fast": 16.0},
     {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0, "beta_slow": 1.0,
      "attention_factor": pytest.approx(0.5 * (1 + 0.1 * np.log(4.0)))}),
])
def test_rope_scaling_keys(keys: dict[str, Any], expected: dict[str, Any] | None, tmp_path: Path) -> None:
    """Linear and yarn scaling keep their numbers, in the hub's keys."""
    config, _ = converted(tmp_path, file_tensors(hub_tensors()), metadata(**keys))
    assert config["rope_scaling"] == expected


@pytest.mark.parametrize(("keys", "message"), [
    ({"llama__block_count": None}, "'llama.block_count' is missing"),
    ({"llama__block_count": "two"}, "'llama.block_count' should be one int, got str"),
    ({"llama__attention__head_count_kv": [2, 2]}, "head_count_kv' should be one int"),
    ({"llama__expert_count": 8}, "mixture of 8 experts"),
    ({"llama__attention__sliding_window": 64}, r"llama\.attention\.sliding_window changes the network"),
    ({"llama__rope__scaling__yarn_ext_factor": 0.5}, r"llama\.rope\.scaling\.yarn_ext_factor changes"),
    ({"llama__rope__dimension_count": 8}, "rope.dimension_count is 8 but a head has 16"),
    ({"llama__attention__value_length": 8}, "value_length is 8 but a head has 16"),
    ({"llama__rope__scaling__type": "longrope"}, "rope scaling 'longrope' is not supported"),
    ({"llama__rope__scaling__type": "linear"}, r"needs the metadata key rope\.scaling\.factor"),
    ({"split__count": 3}, "one of 3 parts of a split GGUF"),
    ({"llama__feed_forward_length": 100}, r"blk\.0\.ffn_gate\.weight has shape \(96, 64\), the metadata says"),
    ({"llama__block_count": 3}, "3 layers"),
    ({"llama__attention__head_count": 5, "llama__attention__key_length": 16}, "no multiple of"),
])
def test_metadata_that_can_not_be_honoured_are_refused(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    """What would change the network, contradicts the tensors or is missing is refused with file, key and value."""
    path = write_gguf(tmp_path / "odd.gguf", file_tensors(hub_tensors()), metadata(**keys))
    with pytest.raises(CheckpointError, match=message) as caught:
        convert(path, tmp_path / "folder")
    assert "odd.gguf" in str(caught.value)
    assert not (tmp_path / "folder").exists()


def test_other_architectures_are_refused_by_name(tmp_path: Path) -> None:
    """Only architecture `llama` is read."""
    path = write_gguf(tmp_path / "q.gguf", {}, {}, architecture="qwen2")
    with pytest.raises(CheckpointError, match=r"q\.gguf: GGUF architecture 'qwen2' is not supported, only llama"):
        read_metadata(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a zip", b"version https://git-lfs.github.com/spec/v1\n"])
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    """What does not begin with the magic word is no GGUF file, however it is named."""
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.gguf is not a GGUF file"):
        read_metadata(path)
    with pytest.raises(CheckpointError, match=r"no\.gguf: can't be read"):
        read_metadata(tmp_path / "no.gguf")


def test_a_truncated_file_is_refused_wherever_it_was_cut(tmp_path: Path) -> None:
    """Cut in the header, the metadata, the tensor list or the data: always one message, never half a model."""
    whole = write_gguf(tmp_path / "whole.gguf", file_tensors(hub_tensors())).read_bytes()
    for length in [*range(4, 400, 13), *range(400, len(whole), 7919), len(whole) - 1]:
        path = tmp_path / "cut.gguf"
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf: the GGUF file is truncated or damaged"):
            convert(path, tmp_path / "folder")


def test_tensors_have_to_fit(tmp_path: Path) -> None:
    """A missing, an unknown and a not dequantisable tensor are each refused by name, and nothing is left behind."""
    tensors = file_tensors(hub_tensors())
    cases = {
        "down_proj.weight": {name: t for name, t in tensors.items() if name != "blk.1.ffn_down.weight"},
        "token_embd.weight is missing": {name: t for name, t in tensors.items() if name != "token_embd.weight"},
        "'blk.0.ffn_gate_inp.weight' has no place": tensors | {"blk.0.ffn_gate_inp.weight": np.zeros(4, np.float32)},
        "o_proj.bias": tensors | {f"blk.{i}.attn_{p}.bias": np.zeros(n, np.float32) for i in range(2)
                                  for p, n in (("q", 64), ("k", 32), ("v", 32))},
        "is of type I32, which can't be dequantised": tensors | {"blk.0.ffn_up.weight": np.zeros((96, 64), np.int32)},
    }
    for message, changed in cases.items():
        with pytest.raises(CheckpointError, match=message):
            convert(write_gguf(tmp_path / "odd.gguf", changed), tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["odd.gguf"]


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    """A conversion makes its folder and returns what the file says about itself; it writes into no other."""
    path = write_gguf(tmp_path / "m.gguf", file_tensors(hub_tensors()))
    assert convert(path, tmp_path / "new") == read_metadata(path)
    before = (tmp_path / "new" / "config.json").stat()
    with pytest.raises(FileExistsError):
        convert(path, tmp_path / "new")
    assert (tmp_path / "new" / "config.json").stat() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "new"]
