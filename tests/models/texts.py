"""The text that model tests read, in the demo model's tokens."""

from __future__ import annotations

from pathlib import Path

from batchgen_beam.text.tokenizer import Tokenizer

TEXT = Path(__file__).with_name("text.txt")


def text_ids(folder: Path, count: int) -> list[int]:
    """The first `count` tokens for the model in `folder`; the text has to have as many."""
    ids = list(Tokenizer.load(folder).encode(TEXT.read_text(), add_bos=False))
    assert len(ids) >= count
    return ids[:count]
