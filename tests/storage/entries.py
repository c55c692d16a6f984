"""Journal entries of any shape."""

from __future__ import annotations

import struct
from array import array
from typing import Any

from hypothesis import strategies as st

from batchgen_beam.errors import ErrorCode
from batchgen_beam.records import (
    ContinuationRecord,
    Failure,
    FinishReason,
    Outcome,
    RowKey,
    SamplingParams,
    TokenLogprobs,
    float_array,
    token_array,
)

SPECIAL = tuple(bytes.fromhex(word) for word in (
    "0000c07f", "0100807f", "ffffffff", "000080ff", "00000080", "01000000"))
"""Float32, little-endian: a quiet NaN, a signalling one, one with all bits set, -inf, -0.0, the least subnormal."""


def key(index: int) -> RowKey:
    """The key of the n-th row."""
    return RowKey(uuid=f"row-{index}", digest=f"{index:064x}")


def logprobs_of(count: int, width: int = 0, *, start: float = -1.0) -> TokenLogprobs:
    """Log-probabilities of `count` tokens."""
    chosen = [start - step for step in range(count)]
    top = [value for value in chosen for _ in range(width)]
    return TokenLogprobs(width=width, chosen=float_array(chosen), top_ids=token_array(range(count * width)),
                         top=float_array(top))


def outcome(index: int, tokens: int = 3, **values: Any) -> Outcome:
    """An answer without text, as the journal gives it back."""
    given: dict[str, Any] = {
        "key": key(index), "token_ids": token_array(range(tokens)), "finish_reason": FinishReason.STOP,
        "prompt_tokens": 7, "logprobs": logprobs_of(tokens), "params": SamplingParams(), "content_print": "content",
        "numeric_print": "numeric"}
    return Outcome(**{**given, **values})


def failure(index: int, code: ErrorCode = ErrorCode.NUMERIC_ERROR, **values: Any) -> Failure:
    """A row without answer."""
    return Failure(key=key(index), code=code, **{"message": "why", **values})


def record(index: int, generated: int = 2, **values: Any) -> ContinuationRecord:
    """A row on its way."""
    given: dict[str, Any] = {
        "key": key(index), "prompt_ids": token_array([5, 6, 7]), "generated_ids": token_array(range(generated)),
        "logprobs": logprobs_of(generated), "params": SamplingParams(seed=index), "content_print": "content",
        "numeric_print": "numeric"}
    return ContinuationRecord(**{**given, **values})


def bits(entry: Outcome | Failure | ContinuationRecord) -> str:
    """All that an entry says, with the bits of its floats: NaNs are equal only to themselves here."""
    if isinstance(entry, Failure):
        return repr(entry)
    parts = entry.logprobs.chosen.tobytes() + entry.logprobs.top.tobytes()
    return f"{entry!r} {parts.hex()}"


_TOKENS = st.lists(st.integers(-2**31, 2**31 - 1), max_size=9).map(token_array)
_FLOATS = st.sampled_from(SPECIAL) | st.floats(width=32).map(lambda value: struct.pack("<f", value))
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@st.composite
def _floats(draw: st.DrawFn, count: int) -> array[float]:
    values = float_array()
    values.frombytes(b"".join(draw(st.lists(_FLOATS, min_size=count, max_size=count))))
    return values


@st.composite
def _logprobs(draw: st.DrawFn, count: int) -> TokenLogprobs:
    width = draw(st.integers(0, 2))
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=count * width, max_size=count * width))
    return TokenLogprobs(width=width, chosen=draw(_floats(count)), top_ids=token_array(ids),
                         top=draw(_floats(count * width)))


_KEYS = st.builds(RowKey, uuid=_TEXT.filter(bool), digest=st.text("0123456789abcdef", min_size=1, max_size=64))
_PARAMS = st.builds(
    SamplingParams, temperature=st.floats(0, 2), top_k=st.integers(0, 2**31 - 1), top_p=st.floats(0, 1),
    seed=st.integers(-2**63, 2**64 - 1), max_tokens=st.none() | st.integers(1, 2**31 - 1), logprobs=st.integers(0, 20))


@st.composite
def outcomes(draw: st.DrawFn) -> Outcome:
    """Any answer."""
    tokens = draw(_TOKENS)
    return Outcome(
        key=draw(_KEYS), choice_index=draw(st.integers(0, 9)), token_ids=tokens, logprobs=draw(_logprobs(len(tokens))),
        finish_reason=draw(st.sampled_from(FinishReason)), stop_reason=draw(st.none() | st.integers() | _TEXT),
        prompt_tokens=draw(st.integers(1, 2**31)), cached_tokens=draw(st.integers(0, 99)), params=draw(_PARAMS),
        content_print=draw(_TEXT), numeric_print=draw(_TEXT), queue_seconds=draw(st.floats(0, 1e9)),
        generate_seconds=draw(st.floats(0, 1e9)))


@st.composite
def records(draw: st.DrawFn) -> ContinuationRecord:
    """Any row on its way."""
    tokens = draw(_TOKENS)
    return ContinuationRecord(
        key=draw(_KEYS), choice_index=draw(st.integers(0, 9)), prompt_ids=draw(_TOKENS), generated_ids=tokens,
        logprobs=draw(_logprobs(len(tokens))), params=draw(_PARAMS), attempts=draw(st.integers(0, 9)),
        content_print=draw(_TEXT), numeric_print=draw(_TEXT), prefilled_tokens=draw(st.integers(0, 2**40)),
        recomputed_tokens=draw(st.integers(0, 2**40)))


def failures() -> st.SearchStrategy[Failure]:
    """Any row without answer; texts may hold an escaped byte."""
    texts = st.builds(lambda a, b: a + b, _TEXT, st.sampled_from(["", "\udcff"]))
    return st.builds(Failure, key=_KEYS, code=st.sampled_from(ErrorCode), message=texts, prompt_head=texts,
                     poison=st.booleans())
