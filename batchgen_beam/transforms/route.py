"""Answers to the output units whose rows asked: joined by row key, so that the order of completion can't matter.

Owns what repeated, missing and foreign answers mean.  Does not know files, nor the order inside a unit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import apache_beam as beam
from apache_beam.pvalue import TaggedOutput

from batchgen_beam.errors import PublishError
from batchgen_beam.records import Answer, Failure, Outcome, RowKey
from batchgen_beam.storage.settling import failure_rank, first_of_choices
from batchgen_beam.storage.totals import RunTotals
from batchgen_beam.storage.units import PlacedAnswer, Placement
from batchgen_beam.transforms.exchange import GroupParcels, bucket_count
from batchgen_beam.transforms.wire import unpack

__all__ = ["RouteToUnits", "Routed", "SettledAnswers", "settle"]

PLACED = "placed"
TOTALS = "totals"


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
    if len(answers) == 1:
        return SettledAnswers(tuple(answers), 0, 0)
    outcomes = [answer for answer in answers if isinstance(answer, Outcome)]
    failures = [answer for answer in answers if isinstance(answer, Failure)]
    if outcomes:
        chosen = first_of_choices(outcomes)
        collapsed = sum(chosen[outcome.choice_index].same_answer(outcome) for outcome in outcomes) - len(chosen)
        kept: tuple[Answer, ...] = tuple(chosen[choice] for choice in sorted(chosen))
    else:
        failure = min(failures, key=failure_rank)
        collapsed = failures.count(failure) - 1
        kept = (failure,)
    return SettledAnswers(kept, collapsed, len(answers) - len(kept) - collapsed)


class RouteRow(beam.DoFn):
    """All places and all answers of one row key."""

    def process(self, group: tuple[str, Iterable[bytes]]) -> Iterator[tuple[str, PlacedAnswer] | TaggedOutput]:
        """(Unit text, PlacedAnswer) for each place; counts of repeated answers on `totals`."""
        text, packed = group
        parcels = [unpack(parcel) for parcel in packed]
        placements = [parcel for parcel in parcels if isinstance(parcel, Placement)]
        answers = [parcel for parcel in parcels if not isinstance(parcel, Placement)]
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
    """(row key text, Placement) and (row key text, Answer), in as many collections as there are -> Routed.

    An answer without place or a place without answer is a `PublishError` that names the row.  `rows` is the expected
    number of rows, where it is known.
    """

    def __init__(self, *, rows: int | None = None) -> None:
        super().__init__()
        self._rows = rows

    def expand(self, inputs: Sequence[beam.PCollection]) -> Routed:
        """See the class."""
        route = beam.ParDo(RouteRow()).with_output_types(tuple[str, PlacedAnswer], totals=RunTotals)
        outputs = (
            inputs
            | "ByRowKey" >> GroupParcels(buckets=bucket_count(self._rows))
            | "RouteRow" >> route.with_outputs(TOTALS, main=PLACED))
        return Routed(outputs[PLACED], outputs[TOTALS])
