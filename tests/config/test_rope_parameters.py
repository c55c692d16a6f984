"""Laws of rope parameters in config.json: two spellings, every kind checked, nothing ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from batchgen_beam.config.model_registry import load_config
from batchgen_beam.config.rope import RopeParameters
from batchgen_beam.errors import CheckpointError

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 2, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 0.5, "attention_factor": None, "truncate": False}


def rope_of(folder: Path, **values: object) -> RopeParameters:
    """The rope of a Llama config.json with these keys."""
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 512, **values}))
    config: Any = load_config(str(folder))
    rope: RopeParameters = config.rope
    return rope


KINDS = {
    "default": ({}, RopeParameters(theta=5e5)),
    "linear": ({"factor": 2}, RopeParameters(rope_type="linear", theta=5e5, factor=2.0)),
    "dynamic": ({"factor": 2.0},
                RopeParameters(rope_type="dynamic", theta=5e5, factor=2.0, original_max_position_embeddings=512)),
    "llama3": (LLAMA3, RopeParameters(rope_type="llama3", theta=5e5, **LLAMA3)),
    "yarn": (YARN, RopeParameters(rope_type="yarn", theta=5e5, **YARN)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spelling", ["type", "rope_type", "both", "rope_parameters"])
def test_spellings(tmp_path: Path, kind: str, spelling: str) -> None:
    """Every kind is read alike in `rope_scaling` with either type key, and in `rope_parameters` with its own theta."""
    keys, expected = KINDS[kind]
    if spelling == "rope_parameters":
        found = rope_of(tmp_path, rope_parameters={"rope_type": kind, "rope_theta": 5e5, **keys})
    else:
        words = {"type": kind, "rope_type": kind} if spelling == "both" else {spelling: kind}
        found = rope_of(tmp_path, rope_theta=500000, rope_scaling={**words, **keys})
    assert found == expected


def test_absent_rope(tmp_path: Path) -> None:
    """Absent or null scaling is the default kind; theta stands alone."""
    assert rope_of(tmp_path) == RopeParameters()
    assert rope_of(tmp_path, rope_theta=1e6, rope_scaling=None) == RopeParameters(theta=1e6)


def test_inner_theta_wins(tmp_path: Path) -> None:
    """A theta inside `rope_parameters` beats a stale one beside it, as in the reference."""
    found = rope_of(tmp_path, rope_theta=1e4, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    assert found == RopeParameters(theta=1e6)


def test_original_length(tmp_path: Path) -> None:
    """Yarn without its original length takes the file's maximum, as the reference does."""
    assert rope_of(tmp_path, rope_scaling={"type": "yarn", "factor": 2.0}).original_max_position_embeddings == 512


@pytest.mark.parametrize(("values", "message"), [
    ({"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2}}, "'yarn' and rope_type 'linear' disagree"),
    ({"rope_scaling": {"factor": 2}}, "factor without a rope_type"),
    ({"rope_scaling": {"type": "longrope", "factor": 2}}, "'longrope' is not supported for this model"),
    ({"rope_scaling": {"type": "su", "factor": 2}}, "'su' is not supported for this model"),
    ({"rope_scaling": {"rope_type": "spiral"}}, "'spiral' is not supported for this model; supported are default"),
    ({"rope_scaling": {"rope_type": 3}}, "rope_type must be text"),
    ({"rope_scaling": {"rope_type": "linear"}}, "'linear' needs factor"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "'llama3' needs low_freq_factor, high_freq_factor"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor must be a finite number"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "factor must be a number of at least 1"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 4}}, "'beta_fast' has no meaning"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "original_max_position": 64}}, "'original_max_position' has"),
    ({"rope_scaling": {**LLAMA3, "rope_type": "llama3", "low_freq_factor": 4.0}}, "high_freq_factor over"),
    ({"rope_theta": -1.0}, "rope_theta must be a number over 0"),
    ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}}, "different"),
    ({"original_max_position_embeddings": 128, "rope_scaling": {**YARN, "type": "yarn"}}, "128 beside the rope and 64"),
])
def test_refusals_name_the_file(tmp_path: Path, values: dict[str, object], message: str) -> None:
    """An unknown kind, a foreign, missing or mistyped key, and a contradiction are refused, never ignored."""
    with pytest.raises(CheckpointError) as caught:
        rope_of(tmp_path, **values)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "config.json"))


def test_longrope_belongs_to_phi3(tmp_path: Path) -> None:
    """Phi-3 takes longrope, also under its old name `su`."""
    scaling = {"type": "su", "short_factor": [1.0, 2], "long_factor": [3.0, 4.0]}
    (tmp_path / "config.json").write_text(json.dumps(
        {"model_type": "phi3", "original_max_position_embeddings": 48, "rope_scaling": scaling}))
    config: Any = load_config(str(tmp_path))
    assert config.rope == RopeParameters(rope_type="longrope", short_factor=(1.0, 2.0), long_factor=(3.0, 4.0),
                                         original_max_position_embeddings=48)


def test_unknown_kind_in_code() -> None:
    """The dataclass itself knows its kinds."""
    with pytest.raises(CheckpointError, match="rope type 'spiral' is unknown"):
        RopeParameters(rope_type="spiral")
