"""The engines that can race: environment, adapter, form of the model and throughput settings of each.

An engine is named `NAME` or `NAME:setting=value:setting=value`, which runs it with other settings under that name.
Knows nothing of processes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace

__all__ = ["ENGINES", "PEERS", "Engine", "engine", "engines"]

PEERS = ("openvino", "vllm", "llama_cpp", "transformers")
"""Environments of the peers, each with a lock file of its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine with its settings.

    `environment` is one of `PEERS`, or `project` for the environment that runs the race; `model` is the form of the
    model: `folder` (as the project resolves it), `hf`, `gguf` or `openvino`.
    """

    name: str
    environment: str
    adapter: str
    model: str
    settings: Mapping[str, object]


def _engines(*known: Engine) -> Mapping[str, Engine]:
    return {engine.name: engine for engine in known}


def _openvino(name: str, **settings: object) -> Engine:
    return Engine(name=name, environment="openvino", adapter="openvino_batching", model="openvino",
                  settings={"precision": "bf16", "kv": "bf16", "batched_tokens": 256, "prefix_caching": False,
                            "lead": False, **settings})


def _vllm(name: str, *, eager: bool) -> Engine:
    return Engine(name=name, environment="vllm", adapter="vllm_cpu", model="hf",
                  settings={"dtype": "bfloat16", "eager": eager, "prefix_caching": True, "batched_tokens": 4096,
                            "preload": True})


def _transformers(name: str, adapter: str, **settings: object) -> Engine:
    return Engine(name=name, environment="transformers", adapter=adapter, model="hf", settings=settings)


ENGINES = _engines(
    Engine(name="ours", environment="project", adapter="ours", model="folder", settings={"kernels": "auto"}),
    _openvino("openvino"),
    _openvino("openvino-prefix", prefix_caching=True, lead=True),
    _openvino("openvino-u8", kv="u8"),
    _openvino("openvino-u8-prefix", kv="u8", prefix_caching=True, lead=True),
    _vllm("vllm", eager=True),
    _vllm("vllm-compiled", eager=False),
    Engine(name="llama_cpp", environment="llama_cpp", adapter="llama_server", model="gguf",
           settings={"slots": 64, "batch": 2048, "ubatch": 512, "flash_attention": "auto", "kv_type": "f16",
                     "weights": "f16", "prefix_caching": True}),
    _transformers("transformers", "transformers_static", batch=64, order="output", attention="sdpa"),
    _transformers("transformers-continuous", "transformers_continuous", attention="paged|sdpa", page_tokens=32,
                  batched_tokens=512, prefix_caching=True),
)


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def engine(text: str) -> Engine:
    """The engine of that name, with the settings behind it; `ValueError` for an unknown name or setting."""
    name, *changes = text.split(":")
    if name not in ENGINES:
        raise ValueError(f"engine {name!r} is unknown; there are {', '.join(ENGINES)}")
    known = ENGINES[name]
    settings = dict(known.settings)
    for change in changes:
        key, _, value = change.partition("=")
        if key not in settings:
            raise ValueError(f"{name} has no setting {key!r}; it has {', '.join(settings)}")
        settings[key] = _value(value)
    return replace(known, name=text, settings=settings)


def engines(text: str) -> list[Engine]:
    """Engines of a comma-separated list, each once."""
    names = text.split(",")
    if len(set(names)) < len(names):
        raise ValueError(f"an engine is named twice in {text}")
    return [engine(name) for name in names]
