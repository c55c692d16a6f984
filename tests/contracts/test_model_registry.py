"""Laws of `batchgen_beam/config/model_registry.py`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import fsspec
import pytest

from batchgen_beam.config import model_registry
from batchgen_beam.config.families.deepseek import DeepseekV3Config, KimiK25Config
from batchgen_beam.config.families.gemma import Gemma3Config
from batchgen_beam.config.families.kimi import KimiK3Config
from batchgen_beam.config.families.llama import LlamaConfig
from batchgen_beam.config.families.mistral import MistralConfig
from batchgen_beam.config.families.qwen import Qwen2Config
from batchgen_beam.config.model_registry import (
    get_registered_models,
    load_config,
    register_config,
    require_supported,
)


def write_config(folder: Path, values: Mapping[str, object]) -> str:
    """A folder that holds this config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


@pytest.fixture
def own_register(monkeypatch: pytest.MonkeyPatch) -> None:
    """A register that the test may change."""
    monkeypatch.setattr(model_registry, "_REGISTER", get_registered_models())


@pytest.mark.usefixtures("own_register")
def test_register_returns_the_class() -> None:
    """The decorator stores the class and returns it unchanged; the same class may be stored again."""

    class Plain:
        pass

    assert register_config("contract-plain")(Plain) is Plain
    assert register_config("contract-plain")(Plain) is Plain
    assert get_registered_models()["contract-plain"] is Plain


@pytest.mark.usefixtures("own_register")
def test_register_refuses_a_second_class() -> None:
    """A different class under a known name is refused unless `replace`."""

    class Other:
        pass

    with pytest.raises(ValueError, match="llama"):
        register_config("llama")(Other)
    assert get_registered_models()["llama"] is LlamaConfig
    register_config("llama", replace=True)(Other)
    assert get_registered_models()["llama"] is Other


def test_registered_models_is_a_copy() -> None:
    """Changing the returned mapping changes nothing."""
    get_registered_models().clear()
    assert get_registered_models()["llama"] is LlamaConfig


def test_every_family_is_registered() -> None:
    """Configuration classes exist for every family, also before its model does."""
    assert set(get_registered_models()) >= {
        "llama", "smollm3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma2", "gemma3", "gemma3_text", "mistral",
        "mistral3", "mixtral", "phi", "phi3", "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25",
        "kimi_linear", "kimi_k3", "glm_moe_dsa", "glm4_moe", "gpt_oss", "minimax_m2"}


def test_folder_decides_not_its_name(tmp_path: Path) -> None:
    """A folder named like one family whose config.json says another is the other."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    folder = write_config(tmp_path / "DeepSeek-V3", {"model_type": "llama", **sizes})
    config = load_config(folder)
    assert isinstance(config, LlamaConfig)
    assert (config.name_or_path, config.hidden_size, config.head_dim) == (folder, 64, 16)


def test_model_type_comes_before_architectures(tmp_path: Path) -> None:
    """`model_type` decides; `architectures` only where it names no registered type."""
    both = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    assert load_config(write_config(tmp_path / "both", both)).model_type == "kimi_k2"
    config = load_config(write_config(tmp_path / "one", {"architectures": ["DeepseekV3ForCausalLM"]}))
    assert type(config) is DeepseekV3Config
    assert config.model_type == "deepseek_v3"


def test_unknown_folder_is_refused(tmp_path: Path) -> None:
    """A config.json of no registered type is refused, naming the file and the registered types."""
    folder = write_config(tmp_path / "Llama-3.1-8B", {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]})
    with pytest.raises(ValueError, match=r"config\.json.*mamba2.*llama"):
        load_config(folder)


@pytest.mark.parametrize("text", ["{", "[1]", "", "\xff"])
def test_bad_json_names_the_file(tmp_path: Path, text: str) -> None:
    """What is no JSON object is refused by the file's name."""
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json"):
        load_config(str(tmp_path))


def test_folder_without_config(tmp_path: Path) -> None:
    """An existing folder without config.json is refused, even under a known name."""
    (tmp_path / "Llama-3.1-8B").mkdir()
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        load_config(str(tmp_path / "Llama-3.1-8B"))


def test_remote_folder() -> None:
    """A folder behind fsspec is decided by its config.json as well."""
    with fsspec.open("memory://hub/GLM-5/config.json", "w") as file:
        json.dump({"model_type": "qwen2", "vocab_size": 7}, file)
    config = load_config("memory://hub/GLM-5/")
    assert isinstance(config, Qwen2Config)
    assert config.vocab_size == 7
    assert config.name_or_path == "memory://hub/GLM-5/"
    with pytest.raises(ValueError, match=r"memory://hub/none/config\.json"):
        load_config("memory://hub/none")


def test_unknown_name_lists_what_is_known() -> None:
    """The error names the identifier, the patterns and the registered types."""
    with pytest.raises(ValueError, match=r"my-model.*gpt-oss.*minimax_m2"):
        load_config("my-model")


@pytest.mark.parametrize("name", ["DeepSeek-R1-Distill-Qwen-7B", "DEEPSEEK-AI/deepseek-r1-distill-qwen-7b"])
def test_distilled_name(name: str) -> None:
    """`DeepSeek-R1-Distill-Qwen-7B` is a Qwen2 model, in any case of letters."""
    assert type(load_config(name)) is Qwen2Config


@pytest.mark.parametrize(("outer", "text", "cls"), [
    ("kimi_k25", "kimi_k2", KimiK25Config),
    ("kimi_k3", "kimi_linear", KimiK3Config),
    ("gemma3", "gemma3_text", Gemma3Config),
    ("mistral3", "mistral", MistralConfig),
])
def test_nested_text_config(tmp_path: Path, outer: str, text: str, cls: type) -> None:
    """The outer type decides, the facts come from `text_config`, the tie flag from outside."""
    folder = write_config(tmp_path, {"model_type": outer, "tie_word_embeddings": False, "vision_config": {},
                                     "text_config": {"model_type": text, "hidden_size": 96, "num_hidden_layers": 5}})
    config = load_config(folder)
    assert type(config) is cls
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == (outer, 96, 5)
    assert config.tie_word_embeddings is False


SUPPORTED = {"llama", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "gpt_oss",
             "batchgen_fake"}


@pytest.mark.parametrize("model_type", sorted(set(get_registered_models()) - SUPPORTED))
def test_known_but_not_supported(tmp_path: Path, model_type: str) -> None:
    """A family without a model is refused when run, not when read."""
    config = load_config(write_config(tmp_path, {"model_type": model_type}))
    with pytest.raises(ValueError, match="config known, model not supported yet"):
        require_supported(config)


@pytest.mark.parametrize("model_type", sorted(SUPPORTED))
def test_supported(tmp_path: Path, model_type: str) -> None:
    """These run; of DeepSeek-V2 the file has to say how many experts a token goes to."""
    require_supported(load_config(write_config(tmp_path, {"model_type": model_type, "num_experts_per_tok": 2})))


@pytest.mark.parametrize(("model_type", "keys", "reason"), [
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 of 8 experts"),
    ("qwen3_moe", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ("deepseek_v2", {}, "num_experts_per_tok null of 64 experts"),
    ("deepseek_v2", {"num_experts_per_tok": 6, "norm_topk_prob": True}, "norm_topk_prob true"),
    ("deepseek_v2", {"num_experts_per_tok": 6, "topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func 'softmax'"),
    ("deepseek_v3", {"n_group": 7}, "n_group 7 with topk_group 4 of 256 experts"),
    ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq 2"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave false"),
    ("kimi_k2", {"topk_method": "greedy"}, "topk_method 'greedy'"),
    ("gpt_oss", {"layer_types": ["full_attention", "chunked_attention"], "num_hidden_layers": 2}, "chunked_attention"),
    ("gpt_oss", {"layer_types": ["full_attention"], "num_hidden_layers": 2}, "layer_types of 1 layers"),
])
def test_values_that_no_model_computes(tmp_path: Path, model_type: str, keys: dict[str, object], reason: str) -> None:
    """A value that would be ignored is refused, by its name."""
    config = load_config(write_config(tmp_path, {"model_type": model_type, **keys}))
    with pytest.raises(ValueError, match=f"not supported for model type '{model_type}': .*{reason}"):
        require_supported(config)
