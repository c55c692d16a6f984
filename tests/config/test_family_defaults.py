"""Defaults and files of every family against transformers' own configuration classes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from batchgen_beam.config.base import ModelConfig
from batchgen_beam.config.families.gemma import Gemma3Config
from batchgen_beam.config.model_registry import get_registered_models, load_config
from batchgen_beam.config.rope import RopeParameters

NOT_IN_TRANSFORMERS = {"batchgen_fake", "kimi_k2", "kimi_k3"}
NAMES = {
    "eos_token_ids": "eos_token_id",
    "hidden_act": "hidden_activation",
    "num_experts": "num_local_experts",
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "max_position_embeddings": "model_max_length",
}
"""Fields that some of transformers' classes call otherwise."""

DERIVED_THERE = {"model_type", "layer_types", "indexer_types", "no_rope_layers", "name_or_path", "dtype", "rope",
                 "local_rope", "quantization"}
TEXT_OF_OTHERS = {"mistral3": "mistral", "gemma3": "gemma3_text", "kimi_k25": "deepseek_v3"}

FAMILIES = sorted(set(get_registered_models()) - NOT_IN_TRANSFORMERS)


def reference(model_type: str, **values: Any) -> dict[str, Any]:
    """Transformers' configuration of the text model, as plain values."""
    found: dict[str, Any] = CONFIG_MAPPING[TEXT_OF_OTHERS.get(model_type, model_type)](**values).to_dict()
    return found


def shared_fields(ours: ModelConfig, theirs: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fields that both know: name -> (ours, theirs)."""
    pairs = {}
    for field in dataclasses.fields(ours):
        key = field.name if field.name in theirs else NAMES.get(field.name, "")
        if field.name not in DERIVED_THERE and key in theirs:
            pairs[field.name] = (getattr(ours, field.name), theirs[key])
    return pairs


def comparable(name: str, value: object) -> object:
    """A value of theirs in our form: lists as tuples; one id, several or none as a tuple."""
    if isinstance(value, list):
        return tuple(value)
    if name == "eos_token_ids":
        return () if value is None else (value,)
    return value


@pytest.mark.parametrize("model_type", FAMILIES)
def test_defaults(model_type: str) -> None:
    """What both classes know has the same default; what differs is listed here with its reason."""
    theirs = reference(model_type)
    pairs = shared_fields(get_registered_models()[model_type](model_type=model_type), theirs)  # type: ignore[call-arg]
    differing = {name: pair for name, pair in pairs.items() if pair[0] != comparable(name, pair[1])}
    allowed = {
        "kimi_k25": {"tie_word_embeddings"},  # the outer class of transformers ties by default, its text part does not
        "qwen2_moe": {"sliding_window"},  # 0 there, where no window is used
        "gemma2": {"use_bidirectional_attention"},  # null there
        "mixtral": {"head_dim"},  # null there: hidden size / heads
    }
    assert set(differing) <= allowed.get(model_type, set()), differing
    assert len(pairs) > 10


@pytest.mark.parametrize("model_type", FAMILIES)
def test_default_rope(model_type: str) -> None:
    """Base, kind and rotary part of the default rope agree."""
    theirs = reference(model_type)["rope_parameters"] if model_type != "kimi_linear" else {"rope_theta": 1e4}
    config: Any = get_registered_models()[model_type](model_type=model_type)  # type: ignore[call-arg]
    if isinstance(config, Gemma3Config):
        assert config.local_rope.theta == theirs["sliding_attention"]["rope_theta"]
        theirs = theirs["full_attention"]
    assert config.rope.theta == theirs["rope_theta"]
    assert config.rope.rope_type == theirs.get("rope_type", "default")
    assert config.rope.partial_rotary_factor == theirs.get("partial_rotary_factor", 1.0)
    assert config.rope.factor == theirs.get("factor", 1.0)


@pytest.mark.parametrize("model_type", [name for name in FAMILIES if name not in TEXT_OF_OTHERS])
def test_file_written_by_transformers(model_type: str, tmp_path: Path) -> None:
    """A config.json that transformers writes, sizes changed, is read with the same facts."""
    sizes = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 6, "vocab_size": 321,
             "eos_token_id": [1, 2], "tie_word_embeddings": True}
    sizes |= {"num_key_value_heads": 6} if model_type != "glm4_moe" else {"num_key_value_heads": 6, "head_dim": 16}
    reference_config = CONFIG_MAPPING[model_type](**sizes)
    reference_config.save_pretrained(tmp_path)
    config = load_config(str(tmp_path))
    theirs = reference_config.to_dict()
    for name, (our, their) in shared_fields(config, theirs).items():
        wanted = comparable(name, their)
        assert our == wanted or (our is False and wanted is None) or (name == "head_dim" and wanted is None), name
    assert (config.hidden_size, config.vocab_size, config.eos_token_ids) == (96, 321, (1, 2))


def test_gemma3_legacy_and_nested_rope_agree(tmp_path: Path) -> None:
    """Gemma-3's two spellings of two ropes give the same facts."""
    legacy = {"model_type": "gemma3_text", "rope_theta": 5e5, "rope_local_base_freq": 2e4, "num_hidden_layers": 4,
              "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    (tmp_path / "config.json").write_text(json.dumps(legacy))
    first = load_config(str(tmp_path))
    CONFIG_MAPPING["gemma3_text"].from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert "sliding_attention" in json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    second = load_config(str(tmp_path))
    assert isinstance(first, Gemma3Config)
    assert isinstance(second, Gemma3Config)
    assert first.rope == second.rope == RopeParameters(rope_type="linear", theta=5e5, factor=8.0)
    assert first.local_rope == second.local_rope == RopeParameters(theta=2e4)


def test_kimi_linear_layers(tmp_path: Path) -> None:
    """The lists of recurrent and attention layers are read from their own object, and typed."""
    linear = {"kda_layers": [1, 2, 3], "full_attn_layers": [4], "num_heads": 4, "head_dim": 16}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_linear", "linear_attn_config": linear}))
    config: Any = load_config(str(tmp_path))
    assert config.linear_attention.kda_layers == (1, 2, 3)
    assert config.linear_attention.num_heads == 4
    linear["kda_layers"] = "all"  # type: ignore[assignment]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_linear", "linear_attn_config": linear}))
    with pytest.raises(ValueError, match=r"config\.json: linear_attn_config: kda_layers must be a list"):
        load_config(str(tmp_path))
