"""What a GGUF file says about itself: architecture, hyperparameters, tokenizer lists.

Owns opening a file through the `gguf` package, refusing by name what can't be read, and turning the metadata into
plain values.  Does not know what the tensors mean, how a tokenizer is built, or the hub's spelling.
Key names are those of the GGUF specification (ggml, docs/gguf.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from gguf import GGUFReader, GGUFValueType

from batchgen_beam.errors import CheckpointError

__all__ = [
    "GgufHyperparameters",
    "GgufMetadata",
    "GgufTokenizer",
    "is_gguf",
    "open_gguf",
    "parse_metadata",
    "read_metadata",
]

SUPPORTED_ARCHITECTURES = ("llama",)
MAGIC = b"GGUF"
_KNOWN = {"rope": {"freq_base", "dimension_count", "scale_linear", "scaling.type", "scaling.factor",
                      "scaling.original_context_length", "scaling.attn_factor", "scaling.finetuned",
                      "scaling.yarn_beta_fast", "scaling.yarn_beta_slow"},
             "attention": {"head_count", "head_count_kv", "key_length", "value_length", "layer_norm_rms_epsilon",
                           "causal"}}
T = TypeVar("T", str, int, float, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHyperparameters:
    """Sizes of the network.  `rope_scaling` is None, or the scaling keys of the file without their prefix."""

    context_length: int
    embedding_length: int
    block_count: int
    feed_forward_length: int
    head_count: int
    head_count_kv: int
    head_size: int
    rms_epsilon: float
    rope_theta: float
    rope_scaling: Mapping[str, str | int | float | bool] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTokenizer:
    """The vocabulary as the file keeps it: parallel lists by token id, and how text is cut before merging.

    `model` is the kind (`gpt2` byte-level merges, `llama` SentencePiece); `pre` names the pre-tokenizer.
    `token_types` follow the specification: 1 normal, 2 unknown, 3 control, 4 user defined, 5 unused, 6 byte.
    `add_*` are None where the file does not say.
    """

    model: str
    pre: str | None
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...]
    scores: tuple[float, ...]
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    eom_id: int | None
    unknown_id: int | None
    padding_id: int | None
    add_bos: bool | None
    add_space_prefix: bool | None
    chat_template: str | None

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end an answer (end of text, of turn, of message), each once, ascending."""
        return tuple(sorted({i for i in (self.eos_id, self.eot_id, self.eom_id) if i is not None}))


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufMetadata:
    """A file's own description."""

    architecture: str
    name: str
    hyperparameters: GgufHyperparameters
    tokenizer: GgufTokenizer


def read_metadata(path: Path) -> GgufMetadata:
    """The metadata of one file.

    Raises:
        CheckpointError: not a GGUF file, torn, another architecture, or a key is missing or of the wrong type.
    """
    return parse_metadata(open_gguf(path), path)


def is_gguf(path: Path) -> bool:
    """Whether the file begins as a GGUF file does; a `CheckpointError` where it can't be read."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror}); check the path") from error


def open_gguf(path: Path) -> GGUFReader:
    """Map a file read-only, with every fault of its structure as a `CheckpointError`."""
    if not is_gguf(path):
        raise CheckpointError(f"{path} is not a GGUF file: it does not begin with {MAGIC!r}")
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        raise CheckpointError(f"{path}: the GGUF file is truncated or damaged ({error}); fetch it again") from error
    if reader.byte_order == "S":
        raise CheckpointError(f"{path}: the GGUF file is of the other byte order; convert it for this machine")
    return reader


def parse_metadata(reader: GGUFReader, path: Path) -> GgufMetadata:
    """Plain values out of an open file; raises as `read_metadata`."""
    keys = _Keys(reader, path)
    architecture = keys.need("general.architecture", str)
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise CheckpointError(f"{path}: GGUF architecture {architecture!r} is not supported, only "
                              f"{', '.join(SUPPORTED_ARCHITECTURES)}; use the model's safetensors folder")
    if (parts := keys.get("split.count", int) or 1) > 1:
        raise CheckpointError(f"{path} is one of {parts} parts of a split GGUF; merge them into one file first")
    return GgufMetadata(architecture=architecture, name=keys.get("general.name", str) or path.stem,
                        hyperparameters=_hyperparameters(keys, architecture), tokenizer=_tokenizer(keys))


class _Keys:
    """Typed access to a reader's fields, with the file named in every error."""

    def __init__(self, reader: GGUFReader, path: Path) -> None:
        self._reader = reader
        self._path = path

    def fault(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {message}")

    def get(self, key: str, kind: type[T]) -> T | None:
        field = self._reader.get_field(key)
        if field is None:
            return None
        value = field.contents()
        if isinstance(value, bool) != (kind is bool) or not isinstance(value, (kind, int) if kind is float else kind):
            raise self.fault(f"metadata key {key!r} should be one {kind.__name__}, got {type(value).__name__}")
        if kind is float and field.types[-1] is GGUFValueType.FLOAT32:
            value = str(np.float32(value))  # the decimal that was meant: 1e-05, not 9.999999747378752e-06
        return kind(value)

    def need(self, key: str, kind: type[T]) -> T:
        value = self.get(key, kind)
        if value is None:
            raise self.fault(f"metadata key {key!r} is missing")
        return value

    def many(self, key: str, kind: type[T]) -> tuple[T, ...]:
        field = self._reader.get_field(key)
        values = [] if field is None else field.contents()
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise self.fault(f"metadata key {key!r} should be a list of {kind.__name__}")
        return tuple(values)

    def under(self, prefix: str) -> dict[str, str]:
        """Full names of the keys under a prefix, by the rest of their name."""
        return {name[len(prefix):]: name for name in self._reader.fields if name.startswith(prefix)}


def _hyperparameters(keys: _Keys, architecture: str) -> GgufHyperparameters:
    a = architecture
    for part, known in _KNOWN.items():
        if unknown := sorted(set(keys.under(f"{a}.{part}.")) - known):
            raise keys.fault(f"metadata key {a}.{part}.{unknown[0]} changes the network and is not supported")
    if experts := keys.get(f"{a}.expert_count", int):
        raise keys.fault(f"a mixture of {experts} experts in a GGUF file is not supported")
    heads = keys.need(f"{a}.attention.head_count", int)
    width = keys.need(f"{a}.embedding_length", int)
    head_size = keys.get(f"{a}.attention.key_length", int) or width // heads
    for key in ("attention.value_length", "rope.dimension_count"):
        if (size := keys.get(f"{a}.{key}", int)) not in (None, head_size):
            raise keys.fault(f"{a}.{key} is {size} but a head has {head_size} entries; that is not supported")
    return GgufHyperparameters(
        context_length=keys.need(f"{a}.context_length", int), embedding_length=width,
        block_count=keys.need(f"{a}.block_count", int),
        feed_forward_length=keys.need(f"{a}.feed_forward_length", int), head_count=heads,
        head_count_kv=keys.get(f"{a}.attention.head_count_kv", int) or heads, head_size=head_size,
        rms_epsilon=keys.need(f"{a}.attention.layer_norm_rms_epsilon", float),
        rope_theta=keys.get(f"{a}.rope.freq_base", float) or 10000.0, rope_scaling=_rope_scaling(keys, a))


def _rope_scaling(keys: _Keys, architecture: str) -> dict[str, str | int | float | bool] | None:
    if (linear := keys.get(f"{architecture}.rope.scale_linear", float)) not in (None, 1.0):
        return {"type": "linear", "factor": linear}
    prefix = f"{architecture}.rope.scaling."
    kind = keys.get(f"{prefix}type", str)
    if kind in (None, "none"):
        return None
    numbers = {rest: keys.need(name, float) for rest, name in keys.under(prefix).items()
               if rest not in ("type", "finetuned")}
    return {"type": kind, **numbers}


def _tokenizer(keys: _Keys) -> GgufTokenizer:
    k = "tokenizer.ggml."
    return GgufTokenizer(
        model=keys.need(f"{k}model", str), pre=keys.get(f"{k}pre", str), tokens=keys.many(f"{k}tokens", str),
        token_types=keys.many(f"{k}token_type", int), merges=keys.many(f"{k}merges", str),
        scores=keys.many(f"{k}scores", float), bos_id=keys.get(f"{k}bos_token_id", int),
        eos_id=keys.get(f"{k}eos_token_id", int), eot_id=keys.get(f"{k}eot_token_id", int),
        eom_id=keys.get(f"{k}eom_token_id", int), unknown_id=keys.get(f"{k}unknown_token_id", int),
        padding_id=keys.get(f"{k}padding_token_id", int), add_bos=keys.get(f"{k}add_bos_token", bool),
        add_space_prefix=keys.get(f"{k}add_space_prefix", bool),
        chat_template=keys.get("tokenizer.chat_template", str))
