"""Laws of reading config.json: types, aliases, nulls, derived sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchgen_beam.config.families.fake import FakeConfig
from batchgen_beam.config.families.llama import LlamaConfig
from batchgen_beam.config.families.mistral import MistralConfig
from batchgen_beam.config.model_registry import load_config
from batchgen_beam.errors import CheckpointError


def load(folder: Path, **values: object) -> LlamaConfig:
    """The Llama configuration that these keys describe."""
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **values}))
    config = load_config(str(folder))
    assert isinstance(config, LlamaConfig)
    return config


@pytest.mark.parametrize(("key", "value", "wanted"), [
    ("hidden_size", "64", "an integer"),
    ("hidden_size", 64.0, "an integer"),
    ("hidden_size", True, "an integer"),
    ("hidden_size", 0, "at least 1"),
    ("num_hidden_layers", -2, "at least 1"),
    ("rms_norm_eps", "1e-5", "a finite number"),
    ("rms_norm_eps", float("nan"), "a finite number"),
    ("rms_norm_eps", -1e-5, "at least 0"),
    ("tie_word_embeddings", "true", "true or false"),
    ("tie_word_embeddings", 1, "true or false"),
    ("hidden_act", 3, "text"),
    ("hidden_act", "gelu", "'gelu' is not supported"),
    ("eos_token_id", [1, "2"], "a list, each item an integer"),
    ("eos_token_id", "2", "an integer"),
    ("rope_theta", "10000", "a finite number"),
    ("rope_scaling", [1], "an object"),
    ("quantization_config", "awq", "an object"),
    ("num_key_value_heads", 3, "no multiple"),
    ("hidden_size", 65, "no multiple"),
    ("head_dim", 15, "even head_dim"),
    ("partial_rotary_factor", 0.5, "partial_rotary_factor 0.5"),
    ("architectures", "LlamaForCausalLM", None),
])
def test_wrong_values_name_key_and_file(tmp_path: Path, key: str, value: object, wanted: str | None) -> None:
    """A value of another type, or out of range, is refused with key, wish and file named; unread keys are free."""
    sizes: dict[str, object] = {"hidden_size": 64, "num_attention_heads": 4}
    if wanted is None:
        load(tmp_path, **sizes | {key: value})
        return
    with pytest.raises(CheckpointError, match=wanted) as caught:
        load(tmp_path, **sizes | {key: value})
    assert str(caught.value).startswith(str(tmp_path / "config.json"))
    assert key.split("_")[-1] in str(caught.value)


def test_derived_sizes(tmp_path: Path) -> None:
    """Absent or null key/value heads are as many as query heads, absent head size is hidden size / heads."""
    config = load(tmp_path, hidden_size=64, num_attention_heads=4, num_key_value_heads=None, head_dim=None)
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)
    config = load(tmp_path, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=24)
    assert (config.num_key_value_heads, config.head_dim) == (2, 24)


@pytest.mark.parametrize(("value", "ids"), [(7, (7,)), ([7, 9], (7, 9)), ([], ()), (None, (2,))])
def test_eos(tmp_path: Path, value: object, ids: tuple[int, ...]) -> None:
    """One id or a list; null is the family's default."""
    assert load(tmp_path, eos_token_id=value).eos_token_ids == ids


@pytest.mark.parametrize(("value", "words"), [
    ("</s>", "eos_token_id must be an integer, got '</s>'"), (-1, "eos_token_id must be at least 0, got -1"),
    ([1, True], "eos_token_id must be a list, each item an integer"),
    ([1, -1], r"eos_token_id must hold ids of at least 0, got \[1, -1\]"),
])
def test_eos_that_is_no_id(tmp_path: Path, value: object, words: str) -> None:
    """What can't be an id is refused with the file, the key and the value."""
    with pytest.raises(CheckpointError, match=rf"config\.json: {words}"):
        load(tmp_path, eos_token_id=value)


@pytest.mark.parametrize(("text", "window"), [
    ("", 4096), (', "sliding_window": null', None), (', "sliding_window": 8', 8),
])
def test_null_is_a_value_where_none_is(tmp_path: Path, text: str, window: int | None) -> None:
    """Null switches off what may be None, and does not fall back to the family's default as an absent key does."""
    (tmp_path / "config.json").write_text(f'{{"model_type": "mistral"{text}}}')
    config = load_config(str(tmp_path))
    assert isinstance(config, MistralConfig)
    assert config.sliding_window == window


def test_aliases(tmp_path: Path) -> None:
    """`dtype` and `torch_dtype` are one fact; saying both differently is refused."""
    assert load(tmp_path, torch_dtype="bfloat16").dtype == "bfloat16"
    assert load(tmp_path, dtype="float16", torch_dtype="float16").dtype == "float16"
    with pytest.raises(CheckpointError, match="mean the same and differ: dtype='float16', torch_dtype='bfloat16'"):
        load(tmp_path, dtype="float16", torch_dtype="bfloat16")


def test_fake_config(tmp_path: Path) -> None:
    """The fake model's kinds are the cache kinds; another word is refused with the allowed ones."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "batchgen_fake", "kind": "windowed", "window": 7}))
    config = load_config(str(tmp_path))
    assert isinstance(config, FakeConfig)
    assert (config.kind, config.window) == ("windowed", 7)
    with pytest.raises(CheckpointError, match="'ring' is unknown; use one of paged, windowed, state"):
        FakeConfig(kind="ring")
