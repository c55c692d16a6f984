"""A complete model folder of the fake model, for dry runs of a job: it costs almost nothing and needs no weights.

Owns the files: config.json, and a tokenizer whose ids are bytes, so that token counts follow from the text.  Does not
know what the model computes.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from batchgen_beam.settings import PAGE_TOKENS

__all__ = ["END_ID", "START_ID", "TEMPLATE", "write_fake_folder"]

END_ID = 256
START_ID = 257

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}[assistant] ")


def _byte_letters() -> list[str]:
    """The letter that stands for each byte in byte-level tokenizers (GPT-2's table)."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def _tokenizer() -> Tokenizer:
    vocabulary = {letter: byte for byte, letter in enumerate(_byte_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|start|>", special=True)])
    return tokenizer


def write_fake_folder(folder: Path, *, template: str | None = TEMPLATE, **config: object) -> Path:
    """Write the folder (made if it is absent) and return it; it is then a model like any other, `--model FOLDER`.

    `template` is the chat template; None leaves the model without one.  `config` overrides keys of config.json, among
    them `kind` (cache kind: paged, windowed, state), `eos_every` (one answer in so many tokens ends; 0: none does) and
    `max_position_embeddings` (tokens of a row).  Ids 0..255 are bytes, 256 ends an answer, 257 begins a prompt.
    """
    folder.mkdir(parents=True, exist_ok=True)
    values = {"model_type": "batchgen_fake", "vocab_size": START_ID + 1, "max_position_embeddings": 16 * PAGE_TOKENS,
              "num_hidden_layers": 2, "eos_token_id": END_ID, "bos_token_id": START_ID, "eos_every": 24, **config}
    (folder / "config.json").write_text(json.dumps(values))
    _tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        {"bos_token": "<|start|>", "eos_token": "<|end|>", "add_bos_token": True}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": END_ID}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder
