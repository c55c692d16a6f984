"""Answers to the output units whose rows asked: joined by row key, so that the order of completion can't matter.

Owns what repeated, missing and foreign answers mean.  Does not know files, nor the order inside a unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.pvalue import TaggedOutput

from batchgen_beam.errors import PublishError
from batchgen_beam.records import Answer, Failure, Outcome, RowKey
from batchgen_beam.storage.totals import RunTotals
from batchgen_beam.storage.units import PlacedAnswer, Placement

__all__ = ["RouteToUnits", "Routed", "SettledAnswers", "settle"]

PLACED = "placed"
TOTALS = "totals"
PLACEMENTS = "placements"
ANSWERS = "answers"


@dataclass(frozen=True, slots=True)
class SettledAnswers:
    """What a row key's answers come to: one failure, or one outcome for each choice.

    `collapsed` counts the answers that repeated a chosen one, `conflicts` those that differed from it.
    """

    answers: tuple[Answer, ...]
    collapsed: int
    conflicts: int


def settle(answers: Sequence[Answer]) -> SettledAnswers:
    """One answer out of at least one: success before failure, then the least numeric print, then the least content.

    Depends on the set of answers, never on their order.
    """
    outcomes = [answer for answer in answers if isinstance(answer, Outcome)]
    failures = [answer for answer in answers if isinstance(answer, Failure)]
    if outcomes:
        chosen = _first_of_choices(outcomes)
        collapsed = sum(chosen[outcome.choice_index].same_answer(outcome) for outcome in outcomes) - len(chosen)
        kept: tuple[Answer, ...] = tuple(chosen[choice] for choice in sorted(chosen))
    else:
        failure = min(failures, key=_failure_rank)
        collapsed = failures.count(failure) - 1
        kept = (failure,)
    return SettledAnswers(kept, collapsed, len(answers) - len(kept) - collapsed)


def _first_of_choices(outcomes: Iterable[Outcome]) -> dict[int, Outcome]:
    chosen: dict[int, Outcome] = {}
    for outcome in sorted(outcomes, key=_outcome_rank):
        chosen.setdefault(outcome.choice_index, outcome)
    return chosen


def _outcome_rank(outcome: Outcome) -> tuple[str, bytes, str]:
    return outcome.numeric_print, outcome.token_ids.tobytes(), repr(outcome)


def _failure_rank(failure: Failure) -> tuple[str, str, str]:
    return failure.code, failure.message, failure.prompt_head


class RouteRow(beam.DoFn):
    """All places and all answers of one row key."""

    def process(self, group: tuple[str, dict[str, Iterable[Any]]]) -> Iterator[tuple[str, PlacedAnswer] | TaggedOutput]:
        """(Unit text, PlacedAnswer) for each place; counts of repeated answers on `totals`."""
        text, sides = group
        placements: list[Placement] = list(sides[PLACEMENTS])
        answers: list[Answer] = list(sides[ANSWERS])
        _check(RowKey.parse(text), placements, answers)
        settled = settle(answers)
        for place in placements:
            yield place.unit, PlacedAnswer(row=place.row, rank=place.rank, occurrence=place.occurrence,
                                           answers=settled.answers)
        if settled.collapsed or settled.conflicts:
            yield TaggedOutput(TOTALS, RunTotals(collapsed=settled.collapsed, conflicts=settled.conflicts))


def _check(key: RowKey, placements: Sequence[Placement], answers: Sequence[Answer]) -> None:
    if not placements:
        raise PublishError(f"there is an answer for row {key.uuid!r} (digest {key.digest}), which no input unit holds")
    if not answers:
        place = min(placements, key=lambda p: (p.unit, p.row))
        raise PublishError(f"row {key.uuid!r} (digest {key.digest}) of unit {place.unit}, row {place.row}, "
                           "has no answer")


class Routed(NamedTuple):
    """(Unit text, PlacedAnswer) for each input row, and `RunTotals` of repeated answers."""

    placed: beam.PCollection
    totals: beam.PCollection


class RouteToUnits(beam.PTransform):
    """(row key text, Placement), (row key text, Answer) -> Routed.

    An answer without place or a place without answer is a `PublishError` that names the row.
    """

    def expand(self, inputs: tuple[beam.PCollection, beam.PCollection]) -> Routed:
        """`inputs` are placements and answers."""
        placements, answers = inputs
        route = beam.ParDo(RouteRow()).with_output_types(tuple[str, PlacedAnswer], totals=RunTotals)
        outputs = (
            {PLACEMENTS: placements, ANSWERS: answers}
            | "ByRowKey" >> beam.CoGroupByKey()
            | "RouteRow" >> route.with_outputs(TOTALS, main=PLACED))
        return Routed(outputs[PLACED], outputs[TOTALS])
