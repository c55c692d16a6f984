"""The end of a run, inside the pipeline: counts summed, reports written, then `_SUCCESS`.

Owns the summing and the check that counts balance.  Does not know how units are published.  Counts come from
collections: Beam's metrics count attempts, so a retried bundle would count twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

import apache_beam as beam

from batchgen_beam.errors import PublishError
from batchgen_beam.records import RowKey
from batchgen_beam.storage.run_files import finish_run, run_report
from batchgen_beam.storage.totals import RunTotals
from batchgen_beam.storage.units import Placement

__all__ = ["CountRepeatedIds", "FinishRun"]


def _id_of(placed: tuple[str, Placement]) -> tuple[str, int]:
    return RowKey.parse(placed[0]).uuid, 1


def _repeated(counted: tuple[str, int]) -> Iterator[RunTotals]:
    _, rows = counted
    if rows > 1:
        yield RunTotals(repeated_ids=1, repeated_id_rows=rows)


class CountRepeatedIds(beam.PTransform):
    """(row key text, Placement) -> RunTotals of ids that occur more than once, in whatever units."""

    def expand(self, placements: beam.PCollection) -> beam.PCollection:
        """See the class."""
        return (
            placements
            | "Ids" >> beam.Map(_id_of).with_output_types(tuple[str, int])
            | "CountIds" >> beam.CombinePerKey(sum)
            | "Repeated" >> beam.FlatMap(_repeated).with_output_types(RunTotals))


class SumTotals(beam.CombineFn):
    """`RunTotals` added up, in any order and grouping."""

    def create_accumulator(self) -> RunTotals:
        """Zeros."""
        return RunTotals()

    def add_input(self, accumulator: RunTotals, element: RunTotals) -> RunTotals:
        """One more part."""
        return RunTotals.sum((accumulator, element))

    def merge_accumulators(self, accumulators: Iterable[RunTotals]) -> RunTotals:
        """Partial sums together."""
        return RunTotals.sum(accumulators)

    def extract_output(self, accumulator: RunTotals) -> RunTotals:
        """The sum."""
        return accumulator


class WriteRun(beam.DoFn):
    """The one element of the sum becomes the run's files."""

    def __init__(self, output: str, run: str, facts: Mapping[str, object], clock: Callable[[], float]) -> None:
        self._output = output
        self._run = run
        self._facts = dict(facts)
        self._clock = clock

    def process(self, totals: RunTotals) -> Iterator[RunTotals]:
        """The sum again, once `_SUCCESS` stands."""
        if not totals.balanced:
            raise PublishError(f"{totals.rows} rows were read, but {totals.results} results and {totals.failed} "
                               "failures were published")
        finished = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="seconds")
        finish_run(self._output, run_report(self._run, {**self._facts, "finished": finished}, totals))
        yield totals


class FinishRun(beam.PTransform):
    """Collections of RunTotals -> the sum, `_runs/<run>.json`, `run.json` and `_SUCCESS` written.

    `facts` is what else the report says (JSON values); `clock` gives seconds since the epoch.  No unit at all is a
    finished run of zero rows.
    """

    def __init__(self, output: str, run: str, facts: Mapping[str, object], *, clock: Callable[[], float]) -> None:
        super().__init__()
        self._write = WriteRun(output, run, facts, clock)

    def expand(self, totals: Sequence[beam.PCollection]) -> beam.PCollection:
        """See the class."""
        return (
            tuple(totals)
            | "AllTotals" >> beam.Flatten()
            | "Sum" >> beam.CombineGlobally(SumTotals())
            | "WriteRun" >> beam.ParDo(self._write).with_output_types(RunTotals))
