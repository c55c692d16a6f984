"""Parameters are checked when they are built: a value that anything later could choke on fails its row by name."""

from __future__ import annotations

import pytest

from batchgen_beam.errors import ErrorCode, RowError
from batchgen_beam.records import SamplingParams


@pytest.mark.parametrize(("name", "value"), [
    ("temperature", -1.0), ("temperature", 2.1), ("temperature", float("nan")), ("temperature", float("inf")),
    ("top_p", -0.1), ("top_p", 1.1), ("top_p", float("nan")), ("top_k", -1), ("top_k", 2**31),
    ("max_tokens", 0), ("max_tokens", -5), ("max_tokens", 2**31), ("max_tokens", 10**30),
    ("seed", 2**64), ("seed", -(2**63) - 1), ("logprobs", -1), ("logprobs", 21),
])
def test_value_out_of_range_names_the_parameter_and_what_is_wanted(name: str, value: float) -> None:
    """A value that the engine, its arrays or the result columns can't hold is INVALID_PARAMETER with the range."""
    with pytest.raises(RowError, match=f"{name} must be an? ") as caught:
        SamplingParams(**{name: value})
    assert caught.value.code is ErrorCode.INVALID_PARAMETER


@pytest.mark.parametrize(("name", "value"), [
    ("temperature", 0.0), ("temperature", 2.0), ("top_p", 0.0), ("top_p", 1.0), ("top_k", 0), ("top_k", 2**31 - 1),
    ("max_tokens", 1), ("max_tokens", 2**31 - 1), ("seed", 2**64 - 1), ("seed", -(2**63)), ("logprobs", 20),
])
def test_ends_of_the_ranges_are_accepted(name: str, value: float) -> None:
    """Each range includes its ends."""
    assert getattr(SamplingParams(**{name: value}), name) == value
