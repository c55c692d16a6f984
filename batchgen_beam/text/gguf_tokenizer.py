"""Tokenizer, template and generation files of a model folder, made from what a GGUF file says about itself.

Owns `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja` and `generation_config.json` of a converted
folder.  Does not know tensors or `config.json`.

Two kinds of vocabulary: `gpt2`, byte-level merges, and `llama`, SentencePiece with scores and byte pieces, where the
merges are read off the scores.  Token types follow the GGUF specification (ggml, docs/gguf.md).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from batchgen_beam.errors import CheckpointError
from batchgen_beam.text.pretokenizers import pretokenization
from batchgen_beam.weights.gguf_metadata import GgufMetadata, GgufTokenizer

__all__ = ["write_tokenizer"]

_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5
_TURN_ENDS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>", "<|endoftext|>"})
"""Control tokens that end an answer whether the file says so or not (llama.cpp finds them by these texts, too)."""

_SPACE = "\u2581"


def write_tokenizer(metadata: GgufMetadata, folder: Path) -> None:
    """Write the four files into an existing folder; the template only where the file has one.

    Raises:
        CheckpointError: the kind of vocabulary or pre-tokenizer is unknown, or a metadata key is missing or wrong; the
            message names it.
    """
    facts = metadata.tokenizer
    _check(facts)
    if facts.model == "gpt2":
        backend, add_bos = _byte_level(facts)
    elif facts.model == "llama":
        backend, add_bos = _sentence_piece(facts), True
    else:
        raise CheckpointError(f"tokenizer.ggml.model is {facts.model!r}; only gpt2 (byte-level merges) and llama "
                              "(SentencePiece) are supported. Use the model's safetensors folder instead")
    _add_tokens(backend, facts)
    add_bos = add_bos if facts.add_bos is None else facts.add_bos
    if add_bos and facts.bos_id is None:
        raise CheckpointError("the tokenizer adds a BOS token, but tokenizer.ggml.bos_token_id is missing")
    backend.save(str(folder / "tokenizer.json"), pretty=False)
    _write_json(folder / "tokenizer_config.json", _config(facts, add_bos))
    _write_json(folder / "generation_config.json", _generation(facts))
    if facts.chat_template is not None:
        (folder / "chat_template.jinja").write_text(facts.chat_template, encoding="utf-8")


def _check(facts: GgufTokenizer) -> None:
    if not facts.tokens:
        raise CheckpointError("tokenizer.ggml.tokens is missing or empty")
    if len(facts.token_types) != len(facts.tokens):
        raise CheckpointError(f"tokenizer.ggml.token_type has {len(facts.token_types)} entries for "
                              f"{len(facts.tokens)} tokens")
    if len(set(facts.tokens)) != len(facts.tokens):
        twice = next(token for i, token in enumerate(facts.tokens) if token in facts.tokens[:i])
        raise CheckpointError(f"tokenizer.ggml.tokens holds {twice!r} twice")
    if facts.eos_id is None:
        raise CheckpointError("tokenizer.ggml.eos_token_id is missing")
    for key, value in _special_ids(facts).items():
        if not 0 <= value < len(facts.tokens):
            raise CheckpointError(f"tokenizer.ggml.{key}_token_id is {value}, but there are {len(facts.tokens)} tokens")


def _special_ids(facts: GgufTokenizer) -> dict[str, int]:
    ids = {"bos": facts.bos_id, "eos": facts.eos_id, "eot": facts.eot_id, "eom": facts.eom_id,
           "unknown": facts.unknown_id, "padding": facts.padding_id}
    return {key: value for key, value in ids.items() if value is not None}


def _vocabulary(facts: GgufTokenizer) -> dict[str, int]:
    """Ids by token.  Unused tokens at the end only fill the embedding up to a round size: they are left out."""
    end = len(facts.tokens)
    while end > 0 and facts.token_types[end - 1] == _UNUSED:
        end -= 1
    return {token: i for i, token in enumerate(facts.tokens[:end])}


def _byte_level(facts: GgufTokenizer) -> tuple[Tokenizer, bool]:
    cutting = pretokenization(facts.pre)
    vocabulary = _vocabulary(facts)
    merges = [_merge(i, text, vocabulary) for i, text in enumerate(facts.merges)]
    if not merges:
        raise CheckpointError("tokenizer.ggml.merges is missing or empty")
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cutting.whole_words))
    backend.pre_tokenizer = cutting.build()
    backend.decoder = decoders.ByteLevel()
    return backend, cutting.add_bos


def _merge(index: int, text: str, vocabulary: dict[str, int]) -> tuple[str, str]:
    left, separator, right = text.partition(" ")
    if not separator or left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
        raise CheckpointError(f"tokenizer.ggml.merges[{index}] is {text!r}, not two tokens whose join is a token")
    return left, right


def _sentence_piece(facts: GgufTokenizer) -> Tokenizer:
    if len(facts.scores) != len(facts.tokens):
        raise CheckpointError(f"tokenizer.ggml.scores has {len(facts.scores)} entries for {len(facts.tokens)} tokens")
    if facts.unknown_id is None:
        raise CheckpointError("tokenizer.ggml.unknown_token_id is missing")
    missing = [byte for byte in range(256) if f"<0x{byte:02X}>" not in facts.tokens]
    if missing:
        raise CheckpointError(f"tokenizer.ggml.tokens has no piece <0x{missing[0]:02X}> for a single byte")
    vocabulary = _vocabulary(facts)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(_merges_by_score(facts, vocabulary)),
                                   unk_token=facts.tokens[facts.unknown_id], fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", _SPACE)
    prefixed = facts.add_space_prefix is not False
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefixed else spaces
    stripped = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
                                         *stripped])
    return backend


def _merges_by_score(facts: GgufTokenizer, vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Every way to join two pieces to a third, best score of the third first.

    SentencePiece joins the neighbours whose join has the best score (Kudo and Richardson 2018; `bpe_model.cc`); control
    and user-defined tokens are never joined.
    """
    pieces = {token: i for token, i in vocabulary.items() if facts.token_types[i] == 1}
    pairs = [(-facts.scores[i], pieces[piece[:cut]], pieces[piece[cut:]], piece[:cut], piece[cut:])
             for piece, i in pieces.items() for cut in range(1, len(piece))
             if piece[:cut] in pieces and piece[cut:] in pieces]
    return ((left, right) for *_, left, right in sorted(pairs))


def _add_tokens(backend: Tokenizer, facts: GgufTokenizer) -> None:
    """Tokens that text is searched for before it is cut: control tokens are special, user-defined ones have text."""
    for token, kind in zip(facts.tokens, facts.token_types, strict=True):
        if kind in (_CONTROL, _UNKNOWN):
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False, special=False)])


def _config(facts: GgufTokenizer, add_bos: bool) -> dict[str, object]:
    named = {"bos_token": facts.bos_id, "eos_token": facts.eos_id, "unk_token": facts.unknown_id,
             "pad_token": facts.padding_id}
    tokens = {name: facts.tokens[i] for name, i in named.items() if i is not None}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": add_bos, **tokens}


def _generation(facts: GgufTokenizer) -> dict[str, object]:
    by_text = {i for i, token in enumerate(facts.tokens)
               if token in _TURN_ENDS and facts.token_types[i] == _CONTROL}
    return {"eos_token_id": sorted(by_text | set(facts.end_ids))}


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
