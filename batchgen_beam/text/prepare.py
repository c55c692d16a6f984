"""An input row made ready for the engine, or refused with a reason.

Owns the order of the checks, that exactly one source of the prompt is given, and lengths.  Does not know Beam, files,
tensors or how a model answers.
"""

from __future__ import annotations

import reprlib
from array import array
from collections.abc import Mapping

from batchgen_beam.errors import ErrorCode, RowError
from batchgen_beam.records import InputRow, Prompt, token_array
from batchgen_beam.settings import GenerationDefaults
from batchgen_beam.text.messages import invalid_row, kind_of, read_turns
from batchgen_beam.text.model_files import ModelDefaults
from batchgen_beam.text.parameters import ParameterRules
from batchgen_beam.text.template import ChatTemplate
from batchgen_beam.text.tokenizer import Tokenizer, check_text

__all__ = ["Preparer", "prompt_head"]

_SOURCES = ("prompt", "messages", "token_ids")
_HEAD_CHARACTERS = 120
_FIRST_LOOK = 8
"""Characters per token of the context that are tokenized at first, where a text is longer than that."""


class Preparer:
    """Makes prompts of rows, for one model and one run; immutable and safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, defaults: GenerationDefaults,
                 model_defaults: ModelDefaults, context_limit: int) -> None:
        """Fix the model's and the run's part.  `context_limit` counts tokens, prompt and answer together.

        Raises:
            OptionError: a run option is out of its range.
        """
        self._tokenizer = tokenizer
        self._template = template
        self._rules = ParameterRules(defaults, model_defaults)
        self._context_limit = context_limit

    def prepare(self, row: InputRow) -> Prompt:
        """The prompt of a row: parameters checked, template applied once, one BOS, at least one token to generate.

        Raises:
            RowError: the row can't be answered; the code says why.
        """
        if row.problem is not None:
            raise invalid_row(row.problem)
        source, value = _only_source(row.values)
        params = self._rules.effective(row.values)
        ids = self._ids(source, value)
        self._check_length(len(ids), "the prompt has {} tokens")
        return Prompt(key=row.key, token_ids=ids, params=params)

    def _ids(self, source: str, value: object) -> array[int]:
        if source == "token_ids":
            return self._given_ids(value)
        if source == "messages":
            return self._encode(self._render(value), add_bos=False)
        if not isinstance(value, str):
            raise invalid_row(f"prompt should be text, got {kind_of(value)}")
        check_text(value, "prompt")
        if not value:
            beside = "; the BOS token alone is no question" if self._tokenizer.prefix else ""
            raise RowError(ErrorCode.EMPTY_PROMPT, f"the prompt is empty{beside}")
        return self._encode(value, add_bos=True)

    def _render(self, value: object) -> str:
        turns = read_turns(value)
        if self._template is None:
            raise RowError(ErrorCode.TEMPLATE_ERROR, "the model has no chat template; give one with --chat-template")
        return self._template.render(turns)

    def _encode(self, text: str, *, add_bos: bool) -> array[int]:
        """Ids of a text.  A very long one is refused after a look at its beginning, at twice the limit.

        Cutting a text moves at most the tokens next to the cut, so twice the limit leaves no doubt.
        """
        look = _FIRST_LOOK * self._context_limit
        while look < len(text):
            count = len(self._tokenizer.encode(text[:look], add_bos=add_bos))
            if count >= 2 * self._context_limit:
                self._check_length(count, f"the first {look} characters of the prompt alone are {{}} tokens")
            look *= 2
        return self._tokenizer.encode(text, add_bos=add_bos)

    def _given_ids(self, value: object) -> array[int]:
        size = self._tokenizer.vocabulary_size
        if not isinstance(value, list | tuple):
            raise invalid_row(f"token_ids should be a list of integers, got {kind_of(value)}")
        for i, item in enumerate(value):
            if type(item) is not int:
                raise invalid_row(f"token_ids[{i}] should be an integer, got {kind_of(item)}")
            if not 0 <= item < size:
                raise invalid_row(f"token_ids[{i}] is {item}, outside the vocabulary of {size} tokens")
        if not value:
            raise RowError(ErrorCode.EMPTY_PROMPT, "token_ids is empty")
        return token_array(value)

    def _check_length(self, count: int, words: str) -> None:
        if count >= self._context_limit:
            raise RowError(ErrorCode.PROMPT_TOO_LONG, f"{words.format(count)}, the context holds "
                           f"{self._context_limit} and needs room for an answer")


def prompt_head(row: InputRow) -> str:
    """The beginning of what the row asks, for a failure: at most 120 characters, always valid Unicode."""
    for source in _SOURCES:
        value = row.values.get(source)
        if value is not None:
            return _clipped(_last_content(value) if source == "messages" else value)
    return ""


def _last_content(value: object) -> object:
    """What the last turn says; the value as it is where there is no such turn."""
    last = value[-1] if isinstance(value, list | tuple) and value else None
    content = last.get("content") if isinstance(last, Mapping) else None
    return content if isinstance(content, str) else value


def _clipped(value: object) -> str:
    text = value if isinstance(value, str) else reprlib.repr(value)
    return text[:_HEAD_CHARACTERS].encode("utf-8", "replace").decode()


def _only_source(values: Mapping[str, object]) -> tuple[str, object]:
    given = [name for name in _SOURCES if values.get(name) is not None]
    if not given:
        raise invalid_row("prompt, messages and token_ids are all null or absent: the row asks nothing")
    if len(given) > 1:
        raise invalid_row(f"{' and '.join(given)} are given; exactly one may have a value")
    return given[0], values[given[0]]
