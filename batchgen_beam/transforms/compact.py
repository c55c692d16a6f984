"""The stage behind `_SUCCESS`: the many parts that runs leave in the journal are merged into few.

Owns the finding of runs that have ended, and how the work is spread.  Does not know what merging is
(`batchgen_beam.storage.compaction`).  A journal that can't be merged is as good as before: it is said in the log, and
the run has ended all the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import apache_beam as beam

from batchgen_beam.storage.compaction import CompactionResult, compact, compaction_batches, ended_runs
from batchgen_beam.storage.in_flight import remove_in_flight
from batchgen_beam.storage.journal import Journal, Part
from batchgen_beam.storage.run_files import reported_runs
from batchgen_beam.storage.store_errors import store_errors
from batchgen_beam.storage.totals import RunTotals
from batchgen_beam.transforms.progress_files import last_seen

__all__ = ["CompactJournal"]

LOG = logging.getLogger(__name__)

Batch = tuple[Part, ...]


class ListBatches(beam.DoFn):
    """The end of the run -> batches of parts of ended runs; their files of rows in flight go at once."""

    def __init__(self, output: str, journal: Journal, compact_seconds: float, clock: Callable[[], float]) -> None:
        self._output = output
        self._journal = journal
        self._compact_seconds = compact_seconds
        self._clock = clock

    def process(self, totals: RunTotals) -> Iterator[Batch]:
        """`totals` only say that the run has its report."""
        try:
            yield from self._batches()
        except store_errors() as error:
            LOG.warning("the journal in %s was not merged: %s", self._journal.folder, error)

    def _batches(self) -> list[Batch]:
        now, parts = self._clock(), self._journal.parts()
        ended = ended_runs(parts, finished=reported_runs(self._output), seen=last_seen(self._output), now=now)
        remove_in_flight(self._journal, ended)
        return compaction_batches(parts, ended=ended, now=now, compact_seconds=self._compact_seconds)


class MergeBatch(beam.DoFn):
    """A batch of parts -> what became of it."""

    def __init__(self, journal: Journal, run: str) -> None:
        self._journal = journal
        self._run = run

    def process(self, batch: Batch) -> Iterator[CompactionResult]:
        """Nothing where the store refuses."""
        try:
            result = compact(self._journal, self._run, batch)
        except store_errors() as error:
            LOG.warning("%d parts of the journal were not merged: %s", len(batch), error)
            return
        for problem in result.problems:
            LOG.warning("%s", problem)
        yield result


class CompactJournal(beam.PTransform):
    """The one RunTotals of a run that has ended -> CompactionResults.

    Parts are merged once they are `compact_seconds` old by `clock`, which gives seconds since the epoch.
    """

    def __init__(self, output: str, journal: Journal, run: str, *, compact_seconds: float,
                 clock: Callable[[], float]) -> None:
        super().__init__()
        self._list = ListBatches(output, journal, compact_seconds, clock)
        self._merge = MergeBatch(journal, run)

    def expand(self, finished: beam.PCollection) -> beam.PCollection:
        """See the class."""
        return (
            finished
            | "ListBatches" >> beam.ParDo(self._list).with_output_types(Batch)
            | "Spread" >> beam.Reshuffle()
            | "MergeBatch" >> beam.ParDo(self._merge).with_output_types(CompactionResult))
