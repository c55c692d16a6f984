"""What the entries of one row come to, whoever wrote them, whenever and however often.

Owns the precedence: outcomes, then a final failure, then the longest continuation.  Depends on the set of entries,
never on their order.  Does not know files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from batchgen_beam.errors import ErrorCode
from batchgen_beam.records import Answer, ContinuationRecord, Failure, Outcome

__all__ = ["Entry", "Settled", "failure_rank", "first_of_choices", "settle_entries"]

Entry = Outcome | Failure | ContinuationRecord
"""What a journal keeps of a row."""


@dataclass(frozen=True, slots=True)
class Settled:
    """One failure, or one outcome for each choice, or where to go on; nothing for a row that starts over."""

    answers: tuple[Answer, ...] = ()
    record: ContinuationRecord | None = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What of the row is worth keeping."""
        return self.answers if self.record is None else (self.record,)


def settle_entries(entries: Iterable[Entry], *, retry: Collection[ErrorCode] = ()) -> Settled:
    """What all entries of one row key come to.

    Failures count as absent where another run tries the row anyway: transient ones, and those of a code of `retry`.
    """
    found = list(entries)
    assert len({entry.key for entry in found}) <= 1, "entries of one row are settled at a time"
    outcomes = first_of_choices(entry for entry in found if isinstance(entry, Outcome))
    if outcomes:
        return Settled(tuple(outcomes[choice] for choice in sorted(outcomes)))
    failures = [entry for entry in found if isinstance(entry, Failure) and _final(entry, retry)]
    if failures:
        return Settled((min(failures, key=failure_rank),))
    records = [entry for entry in found if isinstance(entry, ContinuationRecord)]
    return Settled(record=_longest(records))


def _final(failure: Failure, retry: Collection[ErrorCode]) -> bool:
    return not failure.transient and failure.code not in retry


def _longest(records: list[ContinuationRecord]) -> ContinuationRecord | None:
    """Ties by content: equally long ones have the same tokens, unless they were computed by other numerics."""
    if len(records) < 2:
        return records[0] if records else None
    return max(records, key=lambda record: (len(record.generated_ids), record.to_bytes()))


def first_of_choices(outcomes: Iterable[Outcome]) -> dict[int, Outcome]:
    """One outcome for each choice: the least numeric print, then the least content."""
    found = list(outcomes)
    chosen: dict[int, Outcome] = {}
    for outcome in sorted(found, key=_outcome_rank) if len(found) > 1 else found:
        chosen.setdefault(outcome.choice_index, outcome)
    return chosen


def _outcome_rank(outcome: Outcome) -> tuple[str, bytes, str]:
    return outcome.numeric_print, outcome.token_ids.tobytes(), repr(outcome)


def failure_rank(failure: Failure) -> tuple[str, str, str]:
    """The order in which failures of one row are preferred."""
    return failure.code, failure.message, failure.prompt_head
