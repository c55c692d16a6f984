"""Rotary position parameters in both spellings of config.json, checked by kind and never ignored.

Legacy: `rope_theta` beside `rope_scaling {type | rope_type, ...}`.
Newer: `rope_parameters {rope_theta, rope_type, ...}`.
Knows what each kind needs; does not know frequencies (models do) nor which kinds a family takes (its config says).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from batchgen_beam.config.reading import JsonObject
from batchgen_beam.errors import CheckpointError

__all__ = ["PLAIN_KINDS", "RopeParameters", "parse_rope", "read_rope", "rope_reader"]

PLAIN_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
"""Kinds that a family takes unless it says otherwise."""

_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
_TAKES = {
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor"),
}
_SPELLINGS = {"su": "longrope"}
_WITHOUT_EFFECT = ("finetuned",)
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """One rotary embedding.  `theta` is the base of the frequencies; what a kind does not use keeps its default.

    yarn (arXiv:2309.00071): `mscale` and `mscale_all_dim` given and not 0 decide the attention factor unless
    `attention_factor` is set; `truncate` rounds the ramp's bounds to whole dimensions.
    dynamic: the original length is the file's `max_position_embeddings`, as in the reference.
    llama3: wavelengths over `original / low_freq_factor` are stretched by `factor`, under `original / high_freq_factor`
    kept, between them blended.
    """

    rope_type: str = "default"
    theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rope_type not in _NEEDS:
            raise CheckpointError(f"rope type {self.rope_type!r} is unknown; known are {', '.join(_NEEDS)}")
        _check_positive("rope_theta", self.theta)
        _check_positive("rope factor", self.factor, least=1.0)
        _check_positive("partial_rotary_factor", self.partial_rotary_factor)
        if self.partial_rotary_factor > 1:
            raise CheckpointError(f"partial_rotary_factor must be at most 1, got {self.partial_rotary_factor}")
        if self.rope_type == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise CheckpointError(f"llama3 rope needs high_freq_factor over low_freq_factor, got "
                                  f"{self.high_freq_factor} and {self.low_freq_factor}")


def _check_positive(name: str, value: float, least: float = 0.0) -> None:
    if not (math.isfinite(value) and value > 0 and value >= least):
        raise CheckpointError(f"{name} must be a number {f'of at least {least}' if least else 'over 0'}, got {value}")


def rope_reader(*kinds: str) -> Mapping[str, Any]:
    """Metadata of a config's rope field whose family takes these kinds only."""
    return {"reader": lambda source, default: read_rope(source, default, kinds)}


def read_rope(source: JsonObject, default: RopeParameters, kinds: tuple[str, ...] = PLAIN_KINDS) -> RopeParameters:
    """The rope of a config.json object, in either spelling; both at once have to agree."""
    given = [child for key in ("rope_parameters", "rope_scaling") if (child := source.child(key)) is not None]
    found = [parse_rope(source, child, default, kinds) for child in given]
    if not found:
        return _with_outer(source, default)
    if found[0] != found[-1]:
        raise source.error("rope_parameters and rope_scaling say different things; keep the one that is meant")
    return found[0]


def parse_rope(source: JsonObject, rope: JsonObject, default: RopeParameters, kinds: tuple[str, ...]) -> RopeParameters:
    """The rope described by `rope`, completed by the outer keys of `source`; an unknown kind or key is refused."""
    kind = _kind(rope, kinds)
    takes = _NEEDS[kind] + _TAKES.get(kind, ())
    for key in rope.values:
        if key not in takes + _COMMON + _WITHOUT_EFFECT and rope.values[key] is not None:
            raise rope.error(f"{key!r} has no meaning for rope type {kind!r}, which takes "
                             f"{', '.join(takes) or 'no key'}")
    found = {key: value for key in takes if (value := _read(rope, key)) is not None}
    found |= _original_length(source, rope, kind)
    missing = [key for key in _NEEDS[kind] if key not in found]
    if missing:
        raise rope.error(f"rope type {kind!r} needs {', '.join(missing)}")
    base = _with_outer(source, default, rope)
    plain = RopeParameters(theta=base.theta, partial_rotary_factor=base.partial_rotary_factor)
    try:
        return replace(plain, rope_type=kind, **found)
    except CheckpointError as error:
        raise rope.error(str(error)) from None


_TYPES: Mapping[str, Any] = {
    "original_max_position_embeddings": int, "truncate": bool,
    "short_factor": tuple[float, ...], "long_factor": tuple[float, ...],
}


def _read(rope: JsonObject, key: str) -> Any:
    return rope.read(key, _TYPES.get(key, float), 1 if key == "original_max_position_embeddings" else None)


def _kind(rope: JsonObject, kinds: tuple[str, ...]) -> str:
    named = {key: rope.read(key, str) for key in ("rope_type", "type") if rope.values.get(key) is not None}
    if len(set(named.values())) > 1:
        raise rope.error(f"type {named['type']!r} and rope_type {named['rope_type']!r} disagree")
    scaled = [key for key in rope.values if key not in _COMMON]
    if not named and scaled:
        raise rope.error(f"{', '.join(scaled)} without a rope_type; say which of {', '.join(kinds)} is meant")
    word = next(iter(named.values()), "default")
    kind = _SPELLINGS.get(word, word)
    if kind not in kinds:
        raise rope.error(f"rope type {word!r} is not supported for this model; supported are {', '.join(kinds)}")
    return kind


def _original_length(source: JsonObject, rope: JsonObject, kind: str) -> dict[str, int]:
    key = "original_max_position_embeddings"
    if kind == "dynamic":
        found = source.read("max_position_embeddings", int, 1)
        return {} if found is None else {key: found}
    if key not in _NEEDS[kind]:
        return {}
    inner, outer = _read(rope, key), _read(source, key)
    if inner is not None and outer is not None and inner != outer:
        raise source.error(f"{key} is {outer} beside the rope and {inner} inside it")
    found = inner or outer or source.read("max_position_embeddings", int, 1)
    return {} if found is None else {key: found}


def _with_outer(source: JsonObject, default: RopeParameters, rope: JsonObject | None = None) -> RopeParameters:
    """`default` with theta and the rotary part that the file gives; inside the rope beats beside it, as in the
    reference (re-saved files keep a stale outer theta)."""
    found = {}
    for name, key in (("theta", "rope_theta"), ("partial_rotary_factor", "partial_rotary_factor")):
        inner = None if rope is None else rope.read(key, float)
        value = source.read(key, float) if inner is None else inner
        if value is not None:
            found[name] = value
    try:
        return replace(default, **found)
    except CheckpointError as error:
        raise source.error(str(error)) from None
