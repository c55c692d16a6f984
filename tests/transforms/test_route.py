"""What repeated, missing and foreign answers mean."""

from __future__ import annotations

import itertools

import pytest

from batchgen_beam.errors import ErrorCode, PublishError
from batchgen_beam.records import Answer, Failure, Outcome, RowKey, token_array
from batchgen_beam.storage.totals import RunTotals
from batchgen_beam.storage.units import PlacedAnswer, Placement
from batchgen_beam.transforms.route import RouteRow, settle
from batchgen_beam.transforms.wire import pack
from tests.support.storing import outcome

KEY = RowKey("id", "d")
UNIT = "file:///a.parquet#rg-000000-s-0000"
FAILURE = Failure(key=KEY, code=ErrorCode.ENGINE_ERROR, message="b")


def routed(*parcels: Placement | Answer) -> list[object]:
    """What the step gives for one key."""
    return list(RouteRow().process((KEY.text, [pack(parcel) for parcel in parcels])))


def test_equal_answers_collapse() -> None:
    """Answers that differ only in how long they took are one, and counted."""
    slow = outcome(KEY, generate_seconds=2.0, cached_tokens=5)
    settled = settle([outcome(KEY, generate_seconds=1.0), slow, outcome(KEY)])
    assert (len(settled.answers), settled.collapsed, settled.conflicts) == (1, 2, 0)


def test_differing_answers_are_conflicts() -> None:
    """The least numeric print wins; what differs from it is counted as a conflict."""
    low, high = outcome(KEY, numeric_print="a"), outcome(KEY, numeric_print="b", token_ids=token_array([9]))
    settled = settle([high, low, high])
    assert (settled.answers, settled.collapsed, settled.conflicts) == ((low,), 0, 2)


def test_success_comes_before_failure() -> None:
    """A failure beside an outcome is a conflict that loses; equal failures collapse, others lose to the least."""
    success = outcome(KEY)
    assert settle([FAILURE, success]).answers == (success,)
    assert settle([FAILURE, success]).conflicts == 1
    other = Failure(key=KEY, code=ErrorCode.CANCELLED, message="a")
    settled = settle([FAILURE, FAILURE, other])
    assert (settled.answers, settled.collapsed, settled.conflicts) == ((other,), 0, 2)
    assert settle([FAILURE, FAILURE]).collapsed == 1


def test_choices_are_settled_one_by_one() -> None:
    """Outcomes of different choices are different answers, given in order of choice."""
    first, second = outcome(KEY, choice_index=0), outcome(KEY, choice_index=1)
    settled = settle([second, first, second])
    assert (settled.answers, settled.collapsed, settled.conflicts) == ((first, second), 1, 0)


def test_settling_does_not_depend_on_order() -> None:
    """Every order of the same answers settles alike."""
    answers: list[Answer] = [
        outcome(KEY, numeric_print="b"), outcome(KEY, numeric_print="a"), FAILURE,
        outcome(KEY, numeric_print="a", token_ids=token_array([9])), outcome(KEY, numeric_print="b")]
    assert len({repr(settle(order)) for order in itertools.permutations(answers)}) == 1


def test_every_place_gets_the_answer() -> None:
    """One answer serves all rows of equal key, in whatever units; repeats are counted once for the key."""
    places = [Placement(UNIT, 3, 0, 1), Placement("other", 4, 2, 2)]
    answer = outcome(KEY)
    *placed, totals = routed(places[0], answer, places[1], answer)
    assert placed == [
        (UNIT, PlacedAnswer(row=3, rank=0, occurrence=1, answers=(answer,))),
        ("other", PlacedAnswer(row=4, rank=2, occurrence=2, answers=(answer,)))]
    assert totals.value == RunTotals(collapsed=1)  # type: ignore[attr-defined]


def test_a_row_without_answer_is_named() -> None:
    """A lost answer stops the run with the id, the unit and the row."""
    with pytest.raises(PublishError, match=rf"row 'id' \(digest d\) of unit {UNIT}, row 7, has no answer"):
        routed(Placement(UNIT, 7, 0, 0))


def test_an_answer_without_row_is_named() -> None:
    """An answer that nobody asked for stops the run with its id."""
    with pytest.raises(PublishError, match=r"answer for row 'id' .* which no input unit holds"):
        routed(outcome(KEY))


def test_parcels_survive_the_wire() -> None:
    """What is packed is unpacked equal, outcomes with every field set and failures too."""
    answer = outcome(RowKey("u\x1f#1", "d"), choice_index=2, stop_reason="x", text=None, queue_seconds=0.25)
    for parcel in (answer, FAILURE):
        ((_, placed),) = routed(Placement(UNIT, 1, 0, 0), parcel)  # type: ignore[misc]
        assert placed.answers == (parcel,)
        assert type(placed.answers[0]) in (Outcome, Failure)
