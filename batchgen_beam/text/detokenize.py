"""The final text of an answer.

Owns which ids have text: the end-of-sequence id that ended the answer has none, even where the tokenizer does not
call it special.  Does not know stop strings or streaming; the text is one full decode, so no character is cut.
"""

from __future__ import annotations

from dataclasses import replace

from batchgen_beam.records import FinishReason, Outcome
from batchgen_beam.text.tokenizer import Tokenizer

__all__ = ["with_text"]


def with_text(outcome: Outcome, tokenizer: Tokenizer, eos_ids: frozenset[int]) -> Outcome:
    """The outcome with its `text` set; its ids stay as they are."""
    ids = outcome.token_ids
    if outcome.finish_reason is FinishReason.STOP and ids and ids[-1] in eos_ids:
        ids = ids[:-1]
    return replace(outcome, text=tokenizer.decode(ids))
