"""Chat templates: turns of a conversation made into one prompt text.

Owns where a template comes from, its frozen clock, its identity, and that each fault of it is a row's `TEMPLATE_ERROR`.
Does not know tokenizers, parameters or what a valid list of turns is.

Limits of one rendering: `MAX_STEPS` steps, and `BASE_CHARACTERS` characters plus `CHARACTERS_PER_INPUT` for each
character of the messages, for everything that the template makes on the way, its output included.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import jinja2

from batchgen_beam.config.json_files import read_object
from batchgen_beam.errors import CheckpointError, ErrorCode, InputError, OptionError, RowError
from batchgen_beam.text.meter import Meter
from batchgen_beam.text.sandbox import METER, TemplateSandbox

__all__ = ["BASE_CHARACTERS", "CHARACTERS_PER_INPUT", "ChatTemplate", "TemplateText", "missing_template"]

BASE_CHARACTERS = 1 << 24
CHARACTERS_PER_INPUT = 64
MAX_SOURCE = 1 << 20
_MAX_CLOCK_FORM = 256

_FAULTS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError,
           MemoryError)
"""What an expression of a template can raise."""


class TemplateText(NamedTuple):
    """A template that is not compiled; `name` says in errors where it came from."""

    source: str
    name: str

    @classmethod
    def of_file(cls, path: Path) -> TemplateText:
        """The user's own file; an `OptionError` where it can't be read."""
        try:
            return cls(path.read_text(encoding="utf-8"), path.name)
        except (OSError, ValueError) as error:
            raise OptionError(f"the chat template {path} can't be read: {error}") from error


class ChatTemplate:
    """A compiled template; immutable and safe to share between threads.

    `strftime_now` prints `clock`, whatever the time is, so that a job that is resumed renders what it rendered before.
    """

    def __init__(self, source: str, *, specials: Mapping[str, str], clock: datetime, name: str) -> None:
        """Compile a template; `name` says in errors where it came from.

        Raises:
            CheckpointError: the template does not compile inside the sandbox, or is larger than a mebibyte.
        """
        if len(source) > MAX_SOURCE:
            raise CheckpointError(f"{name} has {len(source)} characters, more than {MAX_SOURCE}: no chat template")
        try:
            self._template = TemplateSandbox().from_string(source)
        except (jinja2.TemplateError, RecursionError, MemoryError, SyntaxError) as error:
            raise CheckpointError(f"{name} can't be used as a chat template: {_reason(error)}") from error
        self._clock = clock
        self._specials = dict(specials)
        self.uses_clock = "strftime_now" in source
        moment = clock.isoformat() if self.uses_clock else ""
        facts = json.dumps([source, sorted(self._specials.items()), moment])
        self.identity = hashlib.sha256(facts.encode("utf-8", "surrogatepass")).hexdigest()[:32]

    @classmethod
    def load(cls, folder: Path, *, specials: Mapping[str, str], clock: datetime,
             own: TemplateText | None = None) -> ChatTemplate | None:
        """The user's template, else the model's own, else None.

        A model keeps it in `chat_template.jinja` or in `tokenizer_config.json`, there as one text or as a list of
        named ones, of which `default` is taken.

        Raises:
            CheckpointError: the model's template is of no known form, or one does not compile.
        """
        found = own or _of_model(folder)
        return None if found is None else cls(found.source, specials=specials, clock=clock, name=found.name)

    def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        """The text of a conversation, ending where the assistant goes on.

        Raises:
            RowError: TEMPLATE_ERROR, with the template's own words.
        """
        characters = BASE_CHARACTERS + CHARACTERS_PER_INPUT * _characters(messages)
        try:
            return self._template.render({
                **self._specials, "messages": messages, "tools": None, "documents": None,
                "add_generation_prompt": True, "strftime_now": self._now, METER: Meter(characters)})
        except _FAULTS as error:
            raise RowError(ErrorCode.TEMPLATE_ERROR, f"the chat template says: {_reason(error)}") from error

    def _now(self, form: str) -> str:
        """The clock as text; widths such as in `%999d` can make it many times as long as its form."""
        if len(form) > _MAX_CLOCK_FORM:
            raise jinja2.TemplateRuntimeError(f"strftime_now is limited to forms of {_MAX_CLOCK_FORM} characters")
        return self._clock.strftime(form)


def missing_template(*, column: str, folder: Path) -> InputError:
    """The error to raise where the input has a column of messages and the model no template."""
    return InputError(f"the input has messages in column {column!r}, but the model in {folder} has no chat template; "
                      "give one as a file with --chat-template, or write prompts to a prompt column")


def _reason(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return text if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {text}"


def _characters(messages: Sequence[Mapping[str, object]]) -> int:
    return sum(len(value) for turn in messages for value in turn.values() if isinstance(value, str))


def _of_model(folder: Path) -> TemplateText | None:
    own = folder / "chat_template.jinja"
    if own.exists():
        try:
            return TemplateText(own.read_text(encoding="utf-8"), str(own))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the chat template {own} can't be read: {error}") from error
    path = folder / "tokenizer_config.json"
    value = read_object(path).values.get("chat_template")
    if isinstance(value, list):
        value = _default_of(path, value)
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{path}: chat_template should be a text or a list of named texts, got a "
                              f"{type(value).__name__}")
    return None if value is None else TemplateText(value, f"chat_template of {path}")


def _default_of(path: Path, named: list[object]) -> object:
    by_name = {item.get("name"): item.get("template") for item in named if isinstance(item, Mapping)}
    if "default" not in by_name:
        raise CheckpointError(f"{path}: chat_template names {', '.join(map(str, by_name)) or 'nothing'}, but no "
                              "'default'; give a template file with --chat-template")
    return by_name["default"]
