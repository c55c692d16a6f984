"""The small JSON files of a model folder that speak about text and sampling.

Owns reading them strictly, the special tokens, the union of end-of-sequence ids and the sampling defaults of
`generation_config.json`.  Does not know tokenizers, templates or weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from batchgen_beam.errors import CheckpointError, RowError
from batchgen_beam.records import SamplingParams

__all__ = ["SPECIAL_TOKENS", "ModelDefaults", "declared_eos_ids", "digest_of_files", "read_json", "special_tokens"]

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names under which tokenizer files keep special tokens, and under which templates see them."""

_OFF_BY_DEFAULT = {"repetition_penalty": 1.0, "min_p": 0.0, "typical_p": 1.0, "no_repeat_ngram_size": 0}


def read_json(path: Path) -> dict[str, object]:
    """The object in a JSON file; empty where the file is absent.

    Raises:
        CheckpointError: the file can't be read, is no JSON, or holds something else than an object.
    """
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} should hold a JSON object, it holds a {type(value).__name__}")
    return value


def digest_of_files(paths: Iterable[Path]) -> str:
    """SHA-256 over the names and bytes of the files that exist, 32 hex digits of it."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        if path.exists():
            data = path.read_bytes()
            digest.update(f"{path.name}\0{len(data)}\0".encode())
            digest.update(data)
    return digest.hexdigest()[:32]


def special_tokens(folder: Path) -> dict[str, str]:
    """Special tokens by name: `tokenizer_config.json`, then `special_tokens_map.json` for what it leaves open."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        values = read_json(path)
        for key in SPECIAL_TOKENS:
            value = values.get(key)
            content = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(content, str):
                found[key] = content
            elif value is not None:
                raise CheckpointError(f"{path}: {key} should be a text, got {value!r}")
    return found


def declared_eos_ids(folder: Path) -> frozenset[int]:
    """Ids under `eos_token_id` in `config.json` (nested `text_config` included) and `generation_config.json`."""
    config = read_json(folder / "config.json")
    nested = config.get("text_config")
    sources: list[tuple[str, Mapping[str, object]]] = [("config.json", config)]
    if isinstance(nested, Mapping):
        sources.append(("config.json text_config", nested))
    sources.append(("generation_config.json", read_json(folder / "generation_config.json")))
    return frozenset(i for name, values in sources for i in _ids(folder / name, values.get("eos_token_id")))


def _ids(where: Path, value: object) -> list[int]:
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise CheckpointError(f"{where}: eos_token_id should be an id or a list of ids, got {value!r}")
    return list(ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDefaults:
    """Sampling that the model's authors advise; None where they say nothing.

    `unapplied` names settings of the file that this release does not apply, as `name=value`.
    Lengths (`max_length`, `max_new_tokens`) are never taken over: a low hidden default would cut answers.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    unapplied: tuple[str, ...] = ()

    @classmethod
    def load(cls, folder: Path) -> ModelDefaults:
        """From `generation_config.json`; `do_sample: false` means greedy, whatever the temperature beside it.

        Raises:
            CheckpointError: a value is of the wrong type or out of its range.
        """
        path = folder / "generation_config.json"
        values = read_json(path)
        temperature, top_p = (_number(path, values, name) for name in ("temperature", "top_p"))
        top_k = _number(path, values, "top_k")
        if top_k is not None and not top_k.is_integer():
            raise CheckpointError(f"{path}: top_k should be an integer, got {top_k}")
        unapplied = tuple(f"{name}={values[name]!r}" for name, off in _OFF_BY_DEFAULT.items()
                          if values.get(name) not in (None, off))
        made = cls(temperature=0.0 if values.get("do_sample") is False else temperature,
                   top_k=None if top_k is None else max(0, int(top_k)), top_p=top_p, unapplied=unapplied)
        made._check(path)
        return made

    def _check(self, path: Path) -> None:
        given = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        try:
            SamplingParams(**{name: value for name, value in given.items() if value is not None})
        except RowError as error:
            raise CheckpointError(f"{path}: {error.message}") from error


def _number(path: Path, values: Mapping[str, object], name: str) -> float | None:
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CheckpointError(f"{path}: {name} should be a number, got {value!r}")
    return float(value)
