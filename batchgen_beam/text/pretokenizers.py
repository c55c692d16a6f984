"""How a GGUF file's text is cut before merging, by the name in `tokenizer.ggml.pre`.

Owns the table of names.  Its source is llama.cpp's `src/llama-vocab.cpp` (names, patterns, which of them take whole
words of the vocabulary without merging, and which add a BOS where the file does not say); a name that is not here is
refused.  Does not know vocabularies.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

from batchgen_beam.errors import CheckpointError

__all__ = ["PreTokenization", "pretokenization"]

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
           r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenization:
    """One way of cutting.  With `pattern` None the pattern is GPT-2's, after single digits if `digits`."""

    pattern: str | None = None
    digits: bool = False
    whole_words: bool = False
    add_bos: bool = False

    def build(self) -> PreTokenizer:
        """The steps, ending in GPT-2's map from bytes to characters."""
        if self.pattern is not None:
            to_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
            return Sequence([Split(Regex(self.pattern), "isolated"), to_bytes])
        gpt2 = ByteLevel(add_prefix_space=False, use_regex=True)
        return Sequence([Digits(individual_digits=True), gpt2]) if self.digits else gpt2


_GPT2 = PreTokenization()
_SINGLE_DIGITS = PreTokenization(digits=True)
_LLAMA_BPE = PreTokenization(pattern=_LLAMA3, whole_words=True, add_bos=True)
_BY_NAME = {
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "minerva-7b": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "falcon3": _LLAMA_BPE,
    "qwen2": PreTokenization(pattern=_QWEN2),
    "megrez": PreTokenization(pattern=_QWEN2),
    "stablelm2": PreTokenization(pattern=_QWEN2),
    "tekken": PreTokenization(pattern=_TEKKEN, whole_words=True, add_bos=True),
}


def pretokenization(name: str | None) -> PreTokenization:
    """The cutting that a file names.

    Raises:
        CheckpointError: the file names none, or one that is not in the table.
    """
    if name is None:
        raise CheckpointError("the GGUF file has no tokenizer.ggml.pre, so its pre-tokenizer is unknown; convert the "
                              "model again with a current llama.cpp")
    if name not in _BY_NAME:
        raise CheckpointError(f"tokenizer.ggml.pre names the pre-tokenizer {name!r}, which is not supported; supported "
                              f"are {', '.join(sorted(_BY_NAME))}. Use the model's safetensors folder instead")
    return _BY_NAME[name]
