"""Configuration classes by model type, and the way from an identifier to a configuration.

Owns the register (the one table of the package that is filled at import, by `register_config`).  Does not know any
family, and never opens a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from batchgen_beam.config.base import ModelConfig
from batchgen_beam.config.json_files import read_object
from batchgen_beam.config.name_patterns import KNOWN_NAMES, model_type_of_name
from batchgen_beam.config.reading import JsonObject
from batchgen_beam.config.source import read_config_json
from batchgen_beam.errors import CheckpointError

__all__ = ["get_registered_models", "is_supported", "load_config", "load_config_file", "register_config",
           "require_supported"]

ConfigClass = TypeVar("ConfigClass", bound=type)

_REGISTER: dict[str, type[ModelConfig]] = {}
_SUPPORTED = frozenset({"llama", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "gpt_oss",
                        "batchgen_fake"})
_OUTER_WINS = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "quantization_config", "compression_config",
               "dtype", "torch_dtype")


def register_config(model_type: str, *, replace: bool = False) -> Callable[[ConfigClass], ConfigClass]:
    """A decorator that stores a configuration class under `model_type` and returns it unchanged.

    A second, different class under the same name is a `ValueError` unless `replace`.
    """

    def store(cls: ConfigClass) -> ConfigClass:
        known = _REGISTER.get(model_type)
        if known is not None and known is not cls and not replace:
            raise ValueError(f"model type {model_type!r} is registered as {known.__name__}; pass replace=True for "
                             f"{cls.__name__}")
        _REGISTER[model_type] = cls
        return cls

    return store


def get_registered_models() -> dict[str, type[ModelConfig]]:
    """A copy of the register: model type -> class."""
    return dict(_REGISTER)


def load_config(model_identifier: str) -> ModelConfig:
    """The configuration of a local or remote folder (its own config.json decides), or of a bare public name.

    A bare name gives the defaults of its family's class.  Raises `CheckpointError` (a `ValueError`) that names the
    identifier, or the file when config.json is at fault.
    """
    identifier = (model_identifier or "").strip()
    if not identifier:
        raise CheckpointError("the model identifier is empty; give a folder or a public model name")
    source = read_config_json(identifier)
    if source is not None:
        return _from_source(source, model_identifier)
    model_type = model_type_of_name(identifier)
    if model_type is None or model_type not in _REGISTER:
        raise CheckpointError(f"{model_identifier!r} is neither a folder nor a known model name.  Known names contain: "
                              f"{', '.join(pattern.pattern for pattern, known in KNOWN_NAMES if known)}.  "
                              f"Registered types: {', '.join(sorted(_REGISTER))}")
    return _REGISTER[model_type](name_or_path=model_identifier, model_type=model_type)  # type: ignore[call-arg]


def is_supported(config: ModelConfig) -> bool:
    """Whether a model is written for the configuration's type."""
    return config.model_type in _SUPPORTED


def load_config_file(path: Path) -> ModelConfig:
    """The configuration that a file says, without the folder around it; `CheckpointError` names what is wrong."""
    if not path.is_file():
        raise CheckpointError(f"{path} is no file")
    return _from_source(read_object(path), str(path))


def require_supported(config: ModelConfig) -> None:
    """Refuse to run a configuration whose model does not exist yet, or that asks of it what it can't compute."""
    if not is_supported(config):
        raise CheckpointError(f"{config.name_or_path or config.model_type}: config known, model not supported yet "
                              f"(model type {config.model_type!r}; supported: {', '.join(sorted(_SUPPORTED))})")
    found = config.unsupported()
    if found:
        raise CheckpointError(f"{config.name_or_path or config.model_type}: not supported for model type "
                              f"{config.model_type!r}: {'; '.join(found)}")


def _from_source(source: JsonObject, name: str) -> ModelConfig:
    model_type = _model_type(source)
    nested = source.child("text_config")
    if nested is not None:
        outer = {key: source.values[key] for key in _OUTER_WINS if source.values.get(key) is not None}
        source = JsonObject({**nested.values, **outer}, nested.where)
    return _REGISTER[model_type].from_json(source, name_or_path=name, model_type=model_type)


def _model_type(source: JsonObject) -> str:
    """The registered type of a config.json: `model_type` first, then `architectures`."""
    named = source.read("model_type", str)
    if named in _REGISTER:
        return str(named)
    architectures = source.read("architectures", tuple[str, ...]) or ()
    for model_type, cls in _REGISTER.items():
        if any(name in cls.architecture_names for name in architectures):
            return model_type
    raise source.error(f"model_type {named!r} with architectures {list(architectures)} is not supported; registered "
                       f"types: {', '.join(sorted(_REGISTER))}")
