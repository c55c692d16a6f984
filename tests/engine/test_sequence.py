"""The coroutine: plain data between events, legal moves only, rebuilt from its record."""

from __future__ import annotations

import pytest

from batchgen_beam.engine.sequence import NewTokens, Sequence, Status, Wish
from batchgen_beam.records import ContinuationRecord, FinishReason, TokenLogprobs, float_array, token_array
from tests.engine.rigs import prompt


def sequence(length: int = 5) -> Sequence:
    """A queued row, advanced to its first wish."""
    row = Sequence(0, prompt("a", length), limit=length + 40, content_print="c", numeric_print="n")
    assert row.advance() is Wish.PREFILL
    return row


def tokens(*ids: int) -> NewTokens:
    """New ids with some log-probabilities."""
    return NewTokens(token_array(ids), TokenLogprobs(chosen=float_array([-0.5] * len(ids))))


def test_wishes_follow_from_the_state() -> None:
    """A row prefills its context, decodes while one token is not computed, and ends when it is told so."""
    row = sequence()
    row.become(Status.PREFILL)
    row.computed_to(3)
    assert row.advance() is Wish.PREFILL
    row.computed_to(5)
    row.absorb(tokens(7), None)
    assert row.advance() is Wish.DECODE
    row.absorb(tokens(8, 9), FinishReason.STOP)
    assert row.advance() is Wish.DONE
    assert list(row.tokens(3, 4)) == [*row.prompt_ids[3:], 7, 8]


@pytest.mark.parametrize(("start", "target"), [
    (Status.QUEUED, Status.DECODE), (Status.QUEUED, Status.HELD), (Status.PREFILL, Status.HELD),
    (Status.HELD, Status.PREFILL), (Status.EVICTED, Status.DECODE), (Status.DONE, Status.PREFILL),
    (Status.SUSPENDED, Status.QUEUED), (Status.DECODE, Status.QUEUED),
])
def test_illegal_moves_raise(start: Status, target: Status) -> None:
    """A move that the diagram does not have raises and changes nothing."""
    row = sequence()
    row.status = start
    with pytest.raises(ValueError, match=f"from {start} to {target}"):
        row.become(target)
    assert row.status is start


def test_eviction_keeps_what_was_said_and_counts_what_is_computed_twice() -> None:
    """Case B2: after each eviction the context is prompt plus generated, once; recomputed tokens are counted."""
    row = sequence()
    row.become(Status.PREFILL)
    row.computed_to(5)
    row.absorb(tokens(7, 8), None)
    row.become(Status.DECODE)
    row.computed_to(6)
    for evictions in (1, 2, 3):
        row.become(Status.EVICTED)
        assert row.context == 7
        assert row.computed == 0
        row.become(Status.PREFILL)
        row.computed_to(7)
        assert row.recomputed == 6 + 7 * (evictions - 1)


def test_record_survives_bytes_and_resumes_the_same_row() -> None:
    """A continuation record is plain data: encoded, decoded and resumed it says the same."""
    row = sequence()
    row.become(Status.PREFILL)
    row.computed_to(5)
    row.absorb(tokens(7, 8), None)
    record = row.suspend()
    assert row.status is Status.SUSPENDED
    copy = ContinuationRecord.from_bytes(record.to_bytes())
    assert copy == record
    again = Sequence.resume(9, copy, limit=45)
    assert again.advance() is Wish.PREFILL
    assert list(again.tokens(0, 7)) == [*row.prompt_ids, 7, 8]
    assert again.record() == record


def test_foreign_bytes_are_refused_by_name() -> None:
    """Another version, a cut record and other data are errors that say so."""
    data = sequence().suspend().to_bytes()
    with pytest.raises(ValueError, match="version 9"):
        ContinuationRecord.from_bytes(data[:4] + b"\x09\x00" + data[6:])
    with pytest.raises(ValueError, match="truncated"):
        ContinuationRecord.from_bytes(data[:20])
    with pytest.raises(ValueError, match="not a continuation record"):
        ContinuationRecord.from_bytes(b"PAR1" + data)
    with pytest.raises(ValueError, match="foreign header"):
        ContinuationRecord.from_bytes(data.replace(b'"attempts"', b'"attempt_"'))
    with pytest.raises(ValueError, match="bytes of arrays"):
        ContinuationRecord.from_bytes(data + b"1234")
