"""The small JSON files of a model folder that speak about text and sampling.

Owns the special tokens, the union of end-of-sequence ids and the sampling defaults of `generation_config.json`.
Does not know tokenizers, templates or weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from batchgen_beam.config.base import read_eos_ids
from batchgen_beam.config.json_files import read_object
from batchgen_beam.errors import RowError
from batchgen_beam.records import SamplingParams

__all__ = ["SPECIAL_TOKENS", "ModelDefaults", "declared_eos_ids", "digest_of_files", "special_tokens"]

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Names under which tokenizer files keep special tokens, and under which templates see them."""

_OFF_BY_DEFAULT = {"repetition_penalty": 1.0, "min_p": 0.0, "typical_p": 1.0, "no_repeat_ngram_size": 0}


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
        source = read_object(folder / name)
        for key in SPECIAL_TOKENS:
            value = source.values.get(key)
            content = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(content, str):
                found[key] = content
            elif value is not None:
                raise source.error(f"{key} must be a text, got {value!r}")
    return found


def declared_eos_ids(folder: Path) -> frozenset[int]:
    """Ids under `eos_token_id` in `config.json` (nested `text_config` included) and `generation_config.json`.

    A file that is silent adds nothing: a family's default may mean another token in this vocabulary.
    """
    config, generation = (read_object(folder / name) for name in ("config.json", "generation_config.json"))
    sources = (config, config.child("text_config"), generation)
    return frozenset(i for source in sources if source is not None for i in read_eos_ids(source) or ())


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
        source = read_object(folder / "generation_config.json")
        given = {"temperature": source.read("temperature", float), "top_k": source.read("top_k", int),
                 "top_p": source.read("top_p", float)}
        if source.values.get("do_sample") is False:
            given["temperature"] = 0.0
        if given["top_k"] is not None:
            given["top_k"] = max(0, given["top_k"])
        try:
            SamplingParams(**{name: value for name, value in given.items() if value is not None})
        except RowError as error:
            raise source.error(error.message) from error
        return cls(**given, unapplied=tuple(f"{name}={source.values[name]!r}" for name, off in _OFF_BY_DEFAULT.items()
                                            if source.values.get(name) not in (None, off)))
