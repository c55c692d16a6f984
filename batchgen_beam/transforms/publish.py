"""Answers of one output unit to its files, in the order of its input, then to its record.

Owns the proof that a unit is complete and in order before it is written.  Does not know schemas or file systems.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import apache_beam as beam

from batchgen_beam.batch_order import batch_matches_expected_uuid_order, local_indices_to_uuid_order
from batchgen_beam.errors import PublishError
from batchgen_beam.records import Failure, RowKey
from batchgen_beam.storage.published import PublishedUnit, publish_unit
from batchgen_beam.storage.totals import RunTotals
from batchgen_beam.storage.unit_records import UnitRecords
from batchgen_beam.storage.units import Manifest, PlacedAnswer, published_name, unit_text
from batchgen_beam.transforms.exchange import GroupParcels
from batchgen_beam.transforms.wire import unpack

__all__ = ["Publish", "UnitReport", "restore_order"]

UnitReport = tuple[str, RunTotals]
"""A unit's `published_name` and its counts."""

_NAMED = 5
"""So many rows are named in an error."""


def restore_order(manifest: Manifest, placed: Sequence[PlacedAnswer]) -> list[PlacedAnswer]:
    """The answers by row, proved against the manifest.

    The two were made independently: the order comes from the answers' row numbers, the expectation from the
    manifest's keys.  A `PublishError` names the rows that are missing, foreign, doubled or in the wrong place.
    """
    expected = manifest.ranked_keys()
    arrival = {place.name: index for index, place in enumerate(placed)}
    order = sorted(range(len(placed)), key=lambda index: placed[index].row)
    if not batch_matches_expected_uuid_order(order, expected, arrival):
        stood = local_indices_to_uuid_order(order, {index: place.name for index, place in enumerate(placed)})
        raise PublishError(f"unit {unit_text(manifest.unit)}: {_mismatch(expected, [name for name in stood if name])}")
    return [placed[index] for index in order]


def _mismatch(expected: Sequence[str], stood: Sequence[str]) -> str:
    what, rows = next((what, rows) for what, rows in _faults(expected, stood) if rows)
    more = ", ..." if len(rows) > _NAMED else ""
    return f"{len(rows)} row{'s' if len(rows) > 1 else ''} {what}: {', '.join(rows[:_NAMED])}{more}"


def _faults(expected: Sequence[str], stood: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each kind of fault with its rows, worst first; once the first three are excluded, the order alone is wrong."""
    found = Counter(stood)
    yield "without answer", [_quoted(name) for name in expected if name not in found]
    yield "foreign to it", [_quoted(name) for name in sorted(found.keys() - set(expected))]
    yield "answered twice", [_quoted(name) for name, count in found.items() if count > 1]
    yield "out of order", [f"{_quoted(name)} stands where {_quoted(wanted)} belongs"
                           for wanted, name in zip(expected, stood, strict=True) if wanted != name]


def _quoted(name: str) -> str:
    return repr(RowKey.parse(name.rpartition("#")[0]).uuid)


class PublishUnit(beam.DoFn):
    """One unit: prove the order, count, write the files, then the record."""

    def __init__(self, records: UnitRecords) -> None:
        self._records = records

    def process(self, group: tuple[str, Iterable[bytes]]) -> Iterator[UnitReport]:
        """The unit's report, once its files stand."""
        text, packed = group
        parcels = [unpack(parcel) for parcel in packed]
        manifest = next((parcel for parcel in parcels if isinstance(parcel, Manifest)), None)
        placed = [parcel for parcel in parcels if isinstance(parcel, PlacedAnswer)]
        if manifest is None:
            raise PublishError(f"unit {text}: it has answers, but no input: {placed[0].key.uuid!r} and "
                               f"{len(placed) - 1} more")
        ordered = restore_order(manifest, placed)
        name, totals = published_name(manifest.unit), RunTotals.of_unit(len(manifest.keys), ordered)
        record = self._records.record(rows=manifest.digest, totals=totals, transient=_transient(ordered))
        if not self._records.stands(name, record):
            publish_unit(self._records.output, PublishedUnit(unit=manifest.unit, model=self._records.model,
                                                             placed=ordered, kept=manifest.kept))
            self._records.write(name, record)
        yield name, totals


def _transient(placed: Iterable[PlacedAnswer]) -> int:
    return sum(isinstance(answer, Failure) and answer.transient for place in placed for answer in place.answers)


class Publish(beam.PTransform):
    """(unit text, Manifest), (unit text, PlacedAnswer) -> UnitReport of each unit, its files and its record written.

    `records` says below which folder, and which name of the model stands in the results.
    """

    def __init__(self, records: UnitRecords) -> None:
        super().__init__()
        self._records = records

    def expand(self, inputs: tuple[beam.PCollection, beam.PCollection]) -> beam.PCollection:
        """`inputs` are manifests and placed answers."""
        publish = beam.ParDo(PublishUnit(self._records)).with_output_types(UnitReport)
        return inputs | "ByUnit" >> GroupParcels() | "PublishUnit" >> publish
