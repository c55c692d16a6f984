"""The errors that leave the package, and the codes of rows that failed.

    BatchgenError
    ├── RowError             one row can't be answered: data, never stops a job
    ├── UserError            the command can't run as given: exit 2, found before Beam starts where possible
    │   ├── OptionError      a flag or a combination of flags
    │   ├── InputError       no input match, unreadable or unsuitable input files
    │   ├── CheckpointError  a model folder or file that must not be used
    │   └── OutputError      an output folder that belongs to other content
    └── FatalError           the job must stop: exit 1
        ├── EngineError      the engine can't answer: its thread died (carries the cause), was closed, or lost rows
        ├── JournalError     answers can't be stored
        └── PublishError     answers do not match the manifest

A row's error is data: the row boundary turns a `RowError` into a `Failure` record.  Fatal errors propagate.
"""

from __future__ import annotations

from enum import StrEnum

__all__ = [
    "TRANSIENT_CODES",
    "BatchgenError",
    "CheckpointError",
    "EngineError",
    "ErrorCode",
    "FatalError",
    "InputError",
    "JournalError",
    "OptionError",
    "OutputError",
    "PublishError",
    "RowError",
    "UserError",
]


class ErrorCode(StrEnum):
    """Why a row has no answer.  Frozen: users filter on these words."""

    EMPTY_PROMPT = "EMPTY_PROMPT"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    INVALID_TEXT = "INVALID_TEXT"
    INVALID_ROW = "INVALID_ROW"
    INVALID_PARAMETER = "INVALID_PARAMETER"
    UNSUPPORTED_PARAMETER = "UNSUPPORTED_PARAMETER"
    TEMPLATE_ERROR = "TEMPLATE_ERROR"
    NUMERIC_ERROR = "NUMERIC_ERROR"
    GRAMMAR_ERROR = "GRAMMAR_ERROR"
    CAPACITY_EXCEEDED = "CAPACITY_EXCEEDED"
    CANCELLED = "CANCELLED"
    ENGINE_ERROR = "ENGINE_ERROR"


TRANSIENT_CODES = frozenset({ErrorCode.CANCELLED, ErrorCode.CAPACITY_EXCEEDED, ErrorCode.ENGINE_ERROR})
"""Failures that another run may not have: its machine or its settings are others."""


class BatchgenError(Exception):
    """Root of the tree."""


class RowError(BatchgenError, ValueError):
    """One row can't be answered; `code` and `message` become its `Failure`."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type[RowError], tuple[ErrorCode, str]]:
        return type(self), (self.code, self.message)


class UserError(BatchgenError, ValueError):
    """The command can't run as given; the message names the thing and the remedy."""


class OptionError(UserError):
    """A flag, an option's value or a combination of them is refused."""


class InputError(UserError):
    """The input is missing, unreadable or of an unusable shape."""


class CheckpointError(UserError):
    """A model folder or file must not be used: incomplete, inconsistent or unsupported."""


class OutputError(UserError):
    """The output folder belongs to other content."""


class FatalError(BatchgenError, RuntimeError):
    """The job must stop; nothing that was published is lost."""


class EngineError(FatalError):
    """The engine can't answer: its thread died (the cause is chained), it was closed, or rows got no answer."""


class JournalError(FatalError):
    """The journal can't be written to (the cause is chained), and too much waits for it or somebody must know."""


class PublishError(FatalError):
    """The answers of a unit do not match its manifest: a key is missing, foreign or out of order."""
