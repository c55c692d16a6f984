"""Effective sampling parameters of a row.

Owns precedence (row, run option, model, built-in) and strict types.  Ranges are `SamplingParams`' own.
Does not know prompts.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from batchgen_beam.errors import ErrorCode, OptionError, RowError
from batchgen_beam.records import SamplingParams
from batchgen_beam.settings import FLOAT_COLUMNS, PARAMETER_COLUMNS, UNSUPPORTED_COLUMNS, GenerationDefaults
from batchgen_beam.text.model_files import ModelDefaults

__all__ = ["ParameterRules"]

_LARGEST_BITS = 64


class ParameterRules:
    """How a row's values become `SamplingParams`."""

    def __init__(self, defaults: GenerationDefaults, model_defaults: ModelDefaults) -> None:
        """Fix what applies where a row is silent.

        Raises:
            OptionError: a run option has the wrong type or is out of its range.
        """
        self._silent: dict[str, object] = {}
        for source in (model_defaults, defaults):
            for name in PARAMETER_COLUMNS:
                if (value := getattr(source, name, None)) is not None:
                    self._silent[name] = value
        try:
            self.effective({})
        except RowError as error:
            raise OptionError(f"run option: {error.message}") from error

    def effective(self, values: Mapping[str, object]) -> SamplingParams:
        """Parameters of a row with these values; a null is the same as no value.

        Raises:
            RowError: UNSUPPORTED_PARAMETER or INVALID_PARAMETER, naming the parameter and its value.
        """
        for name in UNSUPPORTED_COLUMNS:
            if values.get(name) is not None:
                raise RowError(ErrorCode.UNSUPPORTED_PARAMETER, f"{name} has a value but no effect in this release; "
                               "remove the column, or have it ignored by name")
        given = {name: values[name] for name in PARAMETER_COLUMNS if values.get(name) is not None}
        return SamplingParams(**{name: _checked(name, value) for name, value in (self._silent | given).items()})


def _checked(name: str, value: object) -> Any:
    number = _number(name, value)
    if name in FLOAT_COLUMNS:
        return float(number)
    if number != int(number):
        raise RowError(ErrorCode.INVALID_PARAMETER, f"{name} must be an integer, got {value!r}")
    whole = int(number)
    return 0 if name == "top_k" and whole == -1 else whole


def _number(name: str, value: object) -> int | float:
    """A finite number; texts and truth values are none, whatever they look like."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RowError(ErrorCode.INVALID_PARAMETER, f"{name} must be a number, got the {type(value).__name__} "
                       f"{reprlib.repr(value)}")
    if value.bit_length() > _LARGEST_BITS if isinstance(value, int) else not math.isfinite(value):
        raise RowError(ErrorCode.INVALID_PARAMETER, f"{name} must be a finite number of usual size, got "
                       f"{reprlib.repr(value)}")
    return value
