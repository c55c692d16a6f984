"""The precedence of a row's entries: the same for every order and number of copies."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen_beam.errors import TRANSIENT_CODES, ErrorCode
from batchgen_beam.storage.settling import Entry, Settled, settle_entries
from tests.storage.entries import bits, failure, outcome, record

POOL: tuple[Entry, ...] = (
    outcome(1), outcome(1, queue_seconds=3.0), outcome(1, 5, numeric_print="a"), outcome(1, choice_index=1),
    failure(1), failure(1, ErrorCode.GRAMMAR_ERROR), failure(1, ErrorCode.CANCELLED),
    failure(1, ErrorCode.ENGINE_ERROR, poison=True), record(1, 2), record(1, 9), record(1, 9, numeric_print="other"),
    record(1, 0))

ENTRIES = st.sampled_from([0, 4, 8]).flatmap(lambda first: st.lists(st.sampled_from(POOL[first:]), max_size=9))
"""Of everything, without outcomes, and of continuations only."""


def settled_bits(settled: Settled) -> list[str]:
    """Everything that is left, bit for bit."""
    return [bits(entry) for entry in settled.entries]


@settings(max_examples=300, deadline=None)
@given(ENTRIES, st.randoms(use_true_random=False))
def test_order_and_copies_decide_nothing(entries: list[Entry], chance: random.Random) -> None:
    """Any order of any multiset settles alike, and settling what was settled changes nothing."""
    wanted = settled_bits(settle_entries(entries))
    again = [*entries, *entries[: len(entries) // 2]]
    chance.shuffle(again)
    assert settled_bits(settle_entries(again)) == wanted
    assert settled_bits(settle_entries(settle_entries(entries).entries)) == wanted


@settings(max_examples=200, deadline=None)
@given(ENTRIES, ENTRIES)
def test_settling_in_steps_is_settling_at_once(one: list[Entry], two: list[Entry]) -> None:
    """A compaction may merge some parts now and others later; readers see the same."""
    in_steps = settle_entries([*settle_entries(one).entries, *two])
    assert settled_bits(in_steps) == settled_bits(settle_entries([*one, *two]))


def test_the_precedence_under_every_order() -> None:
    """Outcomes of all choices, then a final failure, then the longest continuation; transient failures are nothing."""
    def of(*entries: Entry) -> Sequence[Entry]:
        found = {tuple(settled_bits(settle_entries(order))) for order in itertools.permutations(entries)}
        assert len(found) == 1
        return settle_entries(entries).entries

    assert of(outcome(1), outcome(1, choice_index=1), failure(1), record(1, 9)) == (
        outcome(1), outcome(1, choice_index=1))
    assert of(outcome(1, numeric_print="b"), outcome(1, 4, numeric_print="a")) == (outcome(1, 4, numeric_print="a"),)
    assert of(failure(1), failure(1, ErrorCode.GRAMMAR_ERROR), record(1, 9)) == (failure(1, ErrorCode.GRAMMAR_ERROR),)
    assert len(of(record(1, 9), record(1, 9, numeric_print="other"), record(1, 9, attempts=1))) == 1
    assert of(record(1, 3), record(1, 4), failure(1, ErrorCode.CANCELLED), record(1, 0)) == (record(1, 4),)
    assert all(of(failure(1, code)) == () for code in TRANSIENT_CODES)
    assert of() == ()


def test_poison_is_final_until_it_is_asked_for() -> None:
    """An `ENGINE_ERROR` that is poison stays, unless its code is to be tried again; then its continuation counts."""
    poison = failure(1, ErrorCode.ENGINE_ERROR, poison=True)
    assert settle_entries([poison, record(1)]).answers == (poison,)
    asked = settle_entries([poison, record(1)], retry={ErrorCode.ENGINE_ERROR})
    assert asked == Settled((), record(1))
    assert settle_entries([poison, outcome(1)], retry={ErrorCode.ENGINE_ERROR}).answers == (outcome(1),)
