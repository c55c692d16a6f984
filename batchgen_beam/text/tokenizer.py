"""Text to token ids and back, by the model's own `tokenizer.json`.

Owns exactly one beginning-of-sequence token, the size of the vocabulary, the end-of-sequence ids and the
tokenizer's identity.  Does not know templates, rows or parameters.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from pathlib import Path

import tokenizers

from batchgen_beam.config.json_files import read_object
from batchgen_beam.errors import CheckpointError, ErrorCode, RowError
from batchgen_beam.records import token_array
from batchgen_beam.text.model_files import declared_eos_ids, digest_of_files, special_tokens

__all__ = ["Tokenizer", "check_text"]

_OTHER_FORMATS = ("tiktoken.model", "tokenizer.model", "tekken.json", "vocab.json")
_IDENTITY_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_PROBE = "a"


def check_text(text: str, what: str) -> None:
    """Refuse text that no UTF-8 encoder takes: lone surrogates.

    Raises:
        RowError: INVALID_TEXT, naming the code point and its place.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        point = ord(text[error.start])
        raise RowError(ErrorCode.INVALID_TEXT, f"{what} holds a lone surrogate U+{point:04X} at character "
                       f"{error.start}, which is no Unicode text") from error


class Tokenizer:
    """A model's tokenizer; immutable and safe to share between threads."""

    def __init__(self, backend: tokenizers.Tokenizer, *, specials: dict[str, str], add_bos: bool | None,
                 identity: str) -> None:
        """Take a backend over.  `add_bos` None leaves it to the backend's post-processor."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.identity = identity
        self.special_tokens = specials
        self.vocabulary_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos_id = self._id_of("bos_token")
        self._prefix = self._prefix_ids(add_bos)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Read the tokenizer of a model folder.

        Raises:
            CheckpointError: there is no `tokenizer.json`, or it or a file beside it can't be used.
        """
        path = folder / "tokenizer.json"
        if not path.exists():
            others = [name for name in _OTHER_FORMATS if (folder / name).exists()]
            found = f"only {', '.join(others)}" if others else "no tokenizer at all"
            raise CheckpointError(f"{folder} has no tokenizer.json, {found}; convert the tokenizer with "
                                  "transformers' AutoTokenizer.save_pretrained, or use a folder that has the file")
        try:
            backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except ValueError as error:
            raise CheckpointError(f"{path} can't be read: {error}") from error
        _check_unknown(backend, path)
        return cls(backend, specials=special_tokens(folder),
                   add_bos=read_object(folder / "tokenizer_config.json").read("add_bos_token", bool),
                   identity=digest_of_files(folder / name for name in _IDENTITY_FILES))

    def encode(self, text: str, add_bos: bool) -> array[int]:
        """Token ids of a text; special tokens written in it are recognised.

        With `add_bos` the tokens that the model wants before a raw prompt are put first, unless the text already
        begins with them.  A rendered template writes its own and is encoded without.

        Raises:
            RowError: INVALID_TEXT where the text is not valid Unicode.
        """
        check_text(text, "the text")
        ids = self._backend.encode(text, add_special_tokens=False).ids
        prefix = self._prefix if add_bos else []
        if prefix and ids[: len(prefix)] != prefix and ids[:1] != [self.bos_id]:
            ids = prefix + ids
        return token_array(ids)

    def decode(self, ids: Iterable[int]) -> str:
        """One full decode from the first id; special tokens and ids outside the vocabulary give no text."""
        size = self.vocabulary_size
        return self._backend.decode([i for i in ids if 0 <= i < size], skip_special_tokens=True)

    def eos_ids(self, folder: Path) -> frozenset[int]:
        """Every id that ends a sequence: union of config, generation config and the tokenizer's own."""
        own = self._id_of("eos_token")
        return declared_eos_ids(folder) | (frozenset() if own is None else {own})

    @property
    def prefix(self) -> tuple[int, ...]:
        """What is put before a raw prompt: one BOS, whatever the post-processor adds instead, or nothing."""
        return tuple(self._prefix)

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def _prefix_ids(self, add_bos: bool | None) -> list[int]:
        if add_bos is None:
            return self._post_processor_prefix()
        if not add_bos:
            return []
        if self.bos_id is None:
            named = self.special_tokens.get("bos_token")
            raise CheckpointError(f"tokenizer_config.json asks for a BOS token, but its bos_token {named!r} is not in "
                                  "the vocabulary of tokenizer.json")
        return [self.bos_id]

    def _post_processor_prefix(self) -> list[int]:
        plain = self._backend.encode(_PROBE, add_special_tokens=False).ids
        full = self._backend.encode(_PROBE, add_special_tokens=True).ids
        added = len(full) - len(plain)
        return next((full[:n] for n in range(added + 1) if full[n : n + len(plain)] == plain), [])


def _check_unknown(backend: tokenizers.Tokenizer, path: Path) -> None:
    """Refuse a vocabulary that says nothing about unknown text, where the backend could not encode it."""
    token = getattr(backend.model, "unk_token", None)
    if token is not None and backend.token_to_id(token) is None:
        raise CheckpointError(f"{path}: the token for unknown text {token!r} is not in the vocabulary")
    if isinstance(backend.model, tokenizers.models.Unigram):
        model = read_object(path).child("model")
        if model is None or model.read("unk_id", int, 0) is None:
            raise CheckpointError(f"{path}: the Unigram model has no unk_id, so text with an unknown character has no "
                                  "ids; set it to the id of the unknown token")
