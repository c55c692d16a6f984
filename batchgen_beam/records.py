"""The nouns that travel through the pipeline: keys, parameters, prompts, answers, continuations.

Owns their invariants and what a continuation keeps.  Does not know torch, Beam, files, text or scheduling.
Token ids are `array('i')` and log-probabilities `array('f')`: 4 bytes an item, in memory and pickled.
"""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from batchgen_beam.errors import TRANSIENT_CODES, ErrorCode, RowError
from batchgen_beam.record_codec import RecordFormat

__all__ = [
    "GREEDY_BELOW",
    "Answer",
    "ContinuationRecord",
    "EngineRow",
    "Failure",
    "Fingerprint",
    "FinishReason",
    "InputRow",
    "Outcome",
    "OutputUnit",
    "Prompt",
    "RowKey",
    "SamplingParams",
    "TokenLogprobs",
    "float_array",
    "token_array",
]

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy (vLLM's sampling threshold); the other filters are then ignored."""

MAX_TOP_LOGPROBS = 20

MAX_COUNT = 2**31 - 1
"""Greatest `top_k` and `max_tokens`: result columns are 32-bit integers."""

UNSAID = {"kv_dtype": "auto"}
"""Facts that prints leave out where they have these values."""

_KEY_SEPARATOR = "\x1f"


def token_array(ids: Iterable[int] = ()) -> array[int]:
    """An `array('i')` of token ids."""
    return array("i", ids)


def float_array(values: Iterable[float] = ()) -> array[float]:
    """An `array('f')`: float32 bits are kept as they are."""
    return array("f", values)


class FinishReason(StrEnum):
    """Why generation ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True, order=True)
class RowKey:
    """Identity of a question: the user's id, and the digest of all columns that decide the answer."""

    uuid: str
    digest: str

    def __post_init__(self) -> None:
        if not self.uuid or not self.digest:
            raise ValueError(f"a row key needs an id and a digest, got {self.uuid!r} and {self.digest!r}")

    @property
    def text(self) -> str:
        """The key as one string, for Beam and the random streams."""
        return f"{self.digest}{_KEY_SEPARATOR}{self.uuid}"

    @property
    def hash64(self) -> int:
        """The first 8 bytes of the SHA-256 of `text`, big-endian: spreads keys evenly, alike in every process."""
        return int.from_bytes(hashlib.sha256(self.text.encode()).digest()[:8], "big")

    @classmethod
    def parse(cls, text: str) -> RowKey:
        """The inverse of `text`; the digest holds no separator, the id may."""
        digest, separator, uuid = text.partition(_KEY_SEPARATOR)
        if not separator:
            raise ValueError(f"not a row key: {text!r}")
        return cls(uuid=uuid, digest=digest)


@dataclass(frozen=True, slots=True, order=True)
class OutputUnit:
    """What is published as one file: a slice of at most 10,000 rows of one row group of one input file."""

    shard: str
    row_group: int
    slice_index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRow:
    """A row as it was read: raw values of the columns that decide the answer, under canonical names.

    `values` maps `prompt`, `messages`, `token_ids` and parameter names to Python values; nulls are left out.
    `problem` says why the row can't be prepared at all (its id is null, its JSON line does not parse).
    """

    key: RowKey
    values: Mapping[str, object]
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Effective parameters of one row, immutable.  `top_k` 0 is off; `max_tokens` None is bounded by the context."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int | None = None
    logprobs: int = 0

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0 <= self.temperature <= 2.0, "a number in [0, 2]")
        countable = 0 <= self.top_k <= MAX_COUNT
        _check("top_k", self.top_k, countable, f"an integer in [1, {MAX_COUNT}], or 0 or -1 for off")
        _check("top_p", self.top_p, 0.0 <= self.top_p <= 1.0, "a number in [0, 1]")
        _check("seed", self.seed, -(2**63) <= self.seed < 2**64, "an integer of 64 bits")
        limited = self.max_tokens is None or 1 <= self.max_tokens <= MAX_COUNT
        _check("max_tokens", self.max_tokens, limited, f"an integer in [1, {MAX_COUNT}]")
        listable = 0 <= self.logprobs <= MAX_TOP_LOGPROBS
        _check("logprobs", self.logprobs, listable, f"an integer in [0, {MAX_TOP_LOGPROBS}]")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, ties to the lowest id."""
        return self.temperature < GREEDY_BELOW

    def as_facts(self) -> dict[str, float | int | None]:
        """The parameters by name, as JSON has them."""
        return {name: getattr(self, name) for name in SamplingParams.__dataclass_fields__}


def _check(name: str, value: float | None, holds: bool, wanted: str) -> None:
    if not holds or (isinstance(value, float) and not math.isfinite(value)):
        raise RowError(ErrorCode.INVALID_PARAMETER, f"{name} must be {wanted}, got {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A row that is ready for the engine: token ids and parameters, nothing else."""

    key: RowKey
    token_ids: array[int]
    params: SamplingParams

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise RowError(ErrorCode.EMPTY_PROMPT, "the prompt has no token")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Natural log-probabilities of the raw logits.

    `chosen[n]` belongs to the n-th generated token.  The `width` most likely tokens of step n are
    `top_ids[n * width : (n + 1) * width]`, most likely first, ties to the lowest id.
    """

    width: int = 0
    chosen: array[float] = field(default_factory=float_array)
    top_ids: array[int] = field(default_factory=token_array)
    top: array[float] = field(default_factory=float_array)

    def __post_init__(self) -> None:
        wanted = len(self.chosen) * self.width
        if len(self.top_ids) != wanted or len(self.top) != wanted:
            raise ValueError(f"{len(self.chosen)} tokens of width {self.width} need {wanted} entries, "
                             f"got {len(self.top_ids)} ids and {len(self.top)} values")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The answer of a row.  `token_ids` keeps the end-of-sequence id; `text` is set once it is decoded."""

    key: RowKey
    choice_index: int = 0
    token_ids: array[int]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    prompt_tokens: int
    cached_tokens: int = 0
    logprobs: TokenLogprobs
    params: SamplingParams
    content_print: str
    numeric_print: str
    queue_seconds: float = 0.0
    generate_seconds: float = 0.0
    text: str | None = None

    @property
    def completion_tokens(self) -> int:
        """Generated ids, the end-of-sequence id included."""
        return len(self.token_ids)

    def same_answer(self, other: Outcome) -> bool:
        """Whether both say the same, bit for bit, whenever and however fast they were computed."""
        timeless = {"queue_seconds": 0.0, "generate_seconds": 0.0, "cached_tokens": 0}
        return replace(self, **timeless) == replace(other, **timeless)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a row has no answer.  `poison`: its process died whenever it ran alone."""

    key: RowKey
    code: ErrorCode
    message: str
    prompt_head: str = ""
    poison: bool = False

    @property
    def transient(self) -> bool:
        """Whether the next run tries the row again unasked."""
        return self.code in TRANSIENT_CODES and not self.poison


Answer = Outcome | Failure


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A print: named facts whose digest says whether two computations may be taken for each other."""

    facts: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, facts: Mapping[str, object]) -> Fingerprint:
        """Facts in any order; values are compared as text."""
        return cls(tuple(sorted((name, str(value)) for name, value in facts.items())))

    @property
    def digest(self) -> str:
        """SHA-256 of the facts, 32 hex digits of it."""
        return hashlib.sha256(json.dumps(self.facts).encode()).hexdigest()[:32]

    def differences(self, other: Fingerprint) -> list[str]:
        """One line for each fact that differs: `name: theirs -> ours`."""
        ours, theirs = UNSAID | dict(self.facts), UNSAID | dict(other.facts)
        names = sorted(ours.keys() | theirs.keys())
        return [f"{n}: {theirs.get(n)} -> {ours.get(n)}" for n in names if ours.get(n) != theirs.get(n)]


_CONTINUATION = RecordFormat("continuation record", b"BGCR", 1, "iifif")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuationRecord:
    """The portable form of a sequence coroutine: enough to go on elsewhere with the same bits.

    Valid at every step boundary.  `generated_ids` may be empty: then the row starts over from its prompt.
    """

    key: RowKey
    choice_index: int = 0
    prompt_ids: array[int]
    generated_ids: array[int]
    logprobs: TokenLogprobs
    params: SamplingParams
    attempts: int = 0
    content_print: str
    numeric_print: str
    prefilled_tokens: int = 0
    recomputed_tokens: int = 0

    def __post_init__(self) -> None:
        if len(self.logprobs.chosen) != len(self.generated_ids):
            raise ValueError(f"{len(self.generated_ids)} generated ids, {len(self.logprobs.chosen)} log-probabilities")

    @property
    def prompt(self) -> Prompt:
        """The row as it was before its first token."""
        return Prompt(key=self.key, token_ids=self.prompt_ids, params=self.params)

    @classmethod
    def begin(cls, prompt: Prompt) -> ContinuationRecord:
        """The record of a row that no engine has begun: it belongs to no print."""
        return cls(key=prompt.key, prompt_ids=prompt.token_ids, generated_ids=token_array(), params=prompt.params,
                   logprobs=TokenLogprobs(width=prompt.params.logprobs), content_print="", numeric_print="")

    def to_bytes(self) -> bytes:
        """The durable form, which `from_bytes` reads."""
        logprobs = self.logprobs
        arrays = (self.prompt_ids, self.generated_ids, logprobs.chosen, logprobs.top_ids, logprobs.top)
        return _CONTINUATION.pack({
            "key": [self.key.uuid, self.key.digest],
            "choice_index": self.choice_index,
            "params": self.params.as_facts(),
            "attempts": self.attempts,
            "content_print": self.content_print,
            "numeric_print": self.numeric_print,
            "prefilled_tokens": self.prefilled_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "width": logprobs.width,
        }, arrays)

    @classmethod
    def from_bytes(cls, data: bytes) -> ContinuationRecord:
        """The inverse of `to_bytes`; a `ValueError` names what is wrong (not a record, version, truncated, header)."""
        facts, (prompt, generated, chosen, top_ids, top) = _CONTINUATION.unpack(data)
        try:
            logprobs = TokenLogprobs(width=facts.pop("width"), chosen=chosen, top_ids=top_ids, top=top)
            return cls(key=RowKey(*facts.pop("key")), prompt_ids=prompt, generated_ids=generated, logprobs=logprobs,
                       params=SamplingParams(**facts.pop("params")), **facts)
        except (KeyError, TypeError) as error:
            raise _CONTINUATION.foreign(error) from error


EngineRow = Prompt | ContinuationRecord
"""What an engine takes: a row from its beginning, or from where it was suspended."""
