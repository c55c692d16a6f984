"""A sequence as an event-driven coroutine.

Owns what a row has said so far and where it stands in its life.  The coroutine is a generator that is advanced once
per *event* (its prefill advanced, its KV page is full, it ended), never per token or layer; between two events the
whole state is plain data.  The frame holds only `self` and its position follows from the state, so that `suspend`
may close it anywhere and `resume` builds it anew.  Does not know who owns pages, batches, sampling or text.

    QUEUED -> PREFILL -> DECODE <-> HELD
    PREFILL | DECODE | HELD -> EVICTED -> PREFILL
    every live status -> DONE | FAILED | SUSPENDED
"""

from __future__ import annotations

from array import array
from collections.abc import Generator
from dataclasses import dataclass
from enum import StrEnum

from batchgen_beam.engine.prefix_cache import PromptPages
from batchgen_beam.records import (
    ContinuationRecord,
    FinishReason,
    Prompt,
    RowKey,
    SamplingParams,
    TokenLogprobs,
    token_array,
)

__all__ = ["NewTokens", "Sequence", "Status", "Wish"]


class Status(StrEnum):
    """Where a sequence stands."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    HELD = "held"
    EVICTED = "evicted"
    DONE = "done"
    FAILED = "failed"
    SUSPENDED = "suspended"


_END = {Status.DONE, Status.FAILED, Status.SUSPENDED}
_MOVES: dict[Status, set[Status]] = {
    Status.QUEUED: {Status.PREFILL} | _END,
    Status.PREFILL: {Status.DECODE, Status.EVICTED} | _END,
    Status.DECODE: {Status.HELD, Status.EVICTED} | _END,
    Status.HELD: {Status.DECODE, Status.EVICTED} | _END,
    Status.EVICTED: {Status.PREFILL} | _END,
}


class Wish(StrEnum):
    """What a sequence wants when it yields."""

    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens that were sampled since the last event, with `logprobs` of the same length."""

    ids: array[int]
    logprobs: TokenLogprobs


class Sequence:
    """One row under way.  `computed` counts the positions whose KV is stored; `context` is prompt and generated.

    `prompt_pages` names the full pages of the prompt.  `cached` positions were read from pages that other rows had
    computed and never computed here; `recomputed` positions went through the model again, `resumed` of them because
    another engine had computed them.  `recorded_tokens` were generated when the last record was made, at the clock's
    `recorded_at`.
    """

    __slots__ = (
        "_life",
        "attempts",
        "cached",
        "choice_index",
        "computed",
        "content_print",
        "finish_reason",
        "generated",
        "inherited",
        "key",
        "limit",
        "logprobs",
        "numeric_print",
        "params",
        "prefilled",
        "prompt_ids",
        "prompt_pages",
        "reached",
        "recomputed",
        "recorded_at",
        "recorded_tokens",
        "resumed",
        "seq_id",
        "started",
        "status",
        "submitted",
    )

    def __init__(self, seq_id: int, prompt: Prompt, *, limit: int, content_print: str, numeric_print: str,
                 now: float = 0.0) -> None:
        """`limit` is the greatest context (tokens) this row may reach; `now` is the clock's reading in seconds."""
        self.seq_id = seq_id
        self.key: RowKey = prompt.key
        self.params: SamplingParams = prompt.params
        self.prompt_ids = prompt.token_ids
        self.prompt_pages = PromptPages(prompt.token_ids)
        self.limit = limit
        self.content_print = content_print
        self.numeric_print = numeric_print
        self.choice_index = 0
        self.attempts = 0
        self.generated = token_array()
        self.logprobs = TokenLogprobs(width=prompt.params.logprobs)
        self.status = Status.QUEUED
        self.finish_reason: FinishReason | None = None
        self.computed = self.reached = self.inherited = self.prefilled = self.recomputed = self.resumed = 0
        self.cached = 0
        self.submitted = self.started = self.recorded_at = now
        self.recorded_tokens = 0
        self._life = self._run()

    # The coroutine

    def _run(self) -> Generator[Wish, None, None]:
        while self.finish_reason is None:
            if self.context - self.computed > 1 or not self.generated:
                yield Wish.PREFILL
            else:
                yield Wish.DECODE
        yield Wish.DONE

    def advance(self) -> Wish:
        """Go on to the next event and say what is wanted."""
        return next(self._life)

    # State

    @property
    def context(self) -> int:
        """Prompt and generated tokens, in every status."""
        return len(self.prompt_ids) + len(self.generated)

    def become(self, status: Status) -> None:
        """Change the status; a move that the diagram does not have is a `ValueError`."""
        if status not in _MOVES.get(self.status, set()):
            raise ValueError(f"sequence {self.seq_id} can't go from {self.status} to {status}")
        if status is Status.EVICTED:
            self.computed = self.inherited = 0
        self.status = status

    def tokens(self, start: int, count: int) -> array[int]:
        """Ids at the positions `start .. start + count - 1` of the context."""
        split = len(self.prompt_ids)
        end = start + count
        if end <= split:
            return self.prompt_ids[start:end]
        return self.prompt_ids[start:split] + self.generated[max(start - split, 0) : end - split]

    def computed_to(self, position: int) -> None:
        """KV is stored for all positions before `position`; counts what was computed again."""
        again = max(0, min(position, self.reached) - self.computed)
        self.recomputed += again
        self.resumed += max(0, min(position, self.inherited) - self.computed)
        self.prefilled += position - self.computed
        self.computed = position
        self.reached = max(self.reached, position)

    def found_to(self, position: int) -> None:
        """KV is stored for all positions before `position`, from where it stood on in pages that others computed."""
        self.cached += max(0, position - max(self.computed, self.reached))
        self.computed = position
        self.reached = max(self.reached, position)

    def absorb(self, new: NewTokens, finish_reason: FinishReason | None) -> None:
        """Take the tokens sampled since the last event."""
        self.generated.extend(new.ids)
        self.logprobs.chosen.extend(new.logprobs.chosen)
        self.logprobs.top_ids.extend(new.logprobs.top_ids)
        self.logprobs.top.extend(new.logprobs.top)
        self.finish_reason = finish_reason

    # MIGRATE

    def suspend(self) -> ContinuationRecord:
        """Close the coroutine and return its portable form."""
        record = self.record()
        self._life.close()
        self.become(Status.SUSPENDED)
        return record

    def record(self) -> ContinuationRecord:
        """The portable form, a copy; the sequence goes on."""
        copied = TokenLogprobs(width=self.logprobs.width, chosen=self.logprobs.chosen[:],
                               top_ids=self.logprobs.top_ids[:], top=self.logprobs.top[:])
        return ContinuationRecord(
            key=self.key, choice_index=self.choice_index, prompt_ids=self.prompt_ids,
            generated_ids=self.generated[:], logprobs=copied, params=self.params, attempts=self.attempts,
            content_print=self.content_print, numeric_print=self.numeric_print,
            prefilled_tokens=self.prefilled, recomputed_tokens=self.recomputed)

    @classmethod
    def resume(cls, seq_id: int, record: ContinuationRecord, *, limit: int, now: float = 0.0) -> Sequence:
        """A new coroutine that goes on where the record ends."""
        prompt = Prompt(key=record.key, token_ids=record.prompt_ids, params=record.params)
        sequence = cls(seq_id, prompt, limit=limit, content_print=record.content_print,
                       numeric_print=record.numeric_print, now=now)
        sequence.choice_index = record.choice_index
        sequence.attempts = record.attempts
        sequence.prefilled = record.prefilled_tokens
        sequence.recomputed = record.recomputed_tokens
        sequence.reached = sequence.context + len(record.generated_ids) - 1 if record.generated_ids else 0
        sequence.inherited = sequence.reached
        sequence.recorded_tokens = len(record.generated_ids)
        sequence.absorb(NewTokens(record.generated_ids[:], record.logprobs), None)
        return sequence
