"""Model folders with tiny tokenizers that tests build: byte-level, and SentencePiece-like with byte fallback."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from batchgen_beam.records import InputRow, RowKey
from batchgen_beam.settings import GenerationDefaults
from batchgen_beam.text import tokenizer as text_tokenizer
from batchgen_beam.text.model_files import ModelDefaults
from batchgen_beam.text.prepare import Preparer
from batchgen_beam.text.template import ChatTemplate

CLOCK = datetime(2025, 3, 4, 5, 6, 7)
SPECIALS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
BOS, EOS = 1, 2
CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
          "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
BOS_TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def byte_level() -> Tokenizer:
    """Five special tokens, 256 bytes, and merges for ` t`, `th`, ` the` and `11`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("t", "h"), ("Ġt", "h"), ("Ġth", "e"), ("1", "1")]
    pieces = [*SPECIALS, *alphabet, *(left + right for left, right in merges)]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIALS])
    return backend


def byte_fallback() -> Tokenizer:
    """SentencePiece's habits: a space put before the text, spaces as U+2581, bytes for unknown characters."""
    letters = ["\u2581", *"abcdefghijklmnopqrstuvwxyz"]
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("\u2581", "\u2581")]
    pieces = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *(a + b for a, b in merges)]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges,
                                   unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIALS])
    return backend


def with_bos(backend: Tokenizer) -> Tokenizer:
    """The same with a post-processor that puts `<s>` first, as Llama's has."""
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return backend


def save(folder: Path, backend: Tokenizer, **config: object) -> text_tokenizer.Tokenizer:
    """Write the tokenizer's two files, and load them as the package does."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", **config})
    return text_tokenizer.Tokenizer.load(folder)


def write_json(path: Path, value: object) -> None:
    """A JSON file."""
    path.write_text(json.dumps(value), encoding="utf-8")


def template(source: str) -> ChatTemplate:
    """A template with the tiny tokenizers' special tokens and a fixed clock."""
    return ChatTemplate(source, specials={"bos_token": "<s>", "eos_token": "</s>"}, clock=CLOCK, name="test template")


def preparer(tokenizer: text_tokenizer.Tokenizer, source: str | None = CHATML, *, context: int = 64,
             defaults: GenerationDefaults | None = None, model: ModelDefaults | None = None) -> Preparer:
    """A preparer with the given parts, and plain ones for the rest."""
    return Preparer(tokenizer, None if source is None else template(source), defaults or GenerationDefaults(),
                    model or ModelDefaults(), context)


def row(problem: str | None = None, **values: object) -> InputRow:
    """An input row of these values."""
    return InputRow(key=RowKey("id", "digest"), values=values, problem=problem)
