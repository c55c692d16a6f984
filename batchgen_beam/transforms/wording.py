"""Answers in token ids to answers for a reader.

Owns the restoring of an outcome's text and of a failed prompt's beginning.  Does not know where answers come from.
"""

from __future__ import annotations

from dataclasses import replace

from batchgen_beam.records import Answer, EngineRow, Failure, Outcome, Prompt
from batchgen_beam.text.detokenize import with_text
from batchgen_beam.transforms.model_folder import ModelFolder
from batchgen_beam.transforms.row_boundary import at_row_boundary

__all__ = ["Wording"]

HEAD_LENGTH = 120
"""Characters of a prompt that a failure shows; no token of interest has less than one."""


class Wording:
    """The model's tokenizer at work on answers."""

    def __init__(self, model: ModelFolder) -> None:
        self._model = model

    def answer(self, answer: Answer) -> Answer:
        """An outcome with its text, a failure as it is.  An outcome whose ids can't be decoded becomes a failure."""
        if isinstance(answer, Failure):
            return answer
        return at_row_boundary(answer.key, lambda: self._with_text(answer), lambda: "")

    def answer_to(self, row: EngineRow, answer: Answer) -> Answer:
        """The same with the beginning of the row's prompt in a failure."""
        said = self.answer(answer)
        if isinstance(said, Failure) and not said.prompt_head:
            return replace(said, prompt_head=self._head(row))
        return said

    def _with_text(self, outcome: Outcome) -> Answer:
        return with_text(outcome, self._model.tokenizer, self._model.eos_ids)

    def _head(self, row: EngineRow) -> str:
        ids = row.token_ids if isinstance(row, Prompt) else row.prompt_ids
        return self._model.tokenizer.decode(ids[:HEAD_LENGTH])[:HEAD_LENGTH]
