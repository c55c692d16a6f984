"""The end of a run, inside the pipeline: counts summed, units of earlier runs set aside, reports, then `_SUCCESS`.

Owns the summing and the checks that `_SUCCESS` stands for: every row of the input was read, every row that was read is
published, and the published files are those of this run.  Does not know how units are published.  Counts come from
collections: Beam's metrics count attempts, so a retried bundle would count twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

import apache_beam as beam

from batchgen_beam.errors import PublishError
from batchgen_beam.records import RowKey
from batchgen_beam.storage.files import join, remove
from batchgen_beam.storage.published import is_published, published_names, set_aside, stale_folder
from batchgen_beam.storage.run_files import SUCCESS_FILE, finish_run, read_fingerprint, run_report, write_pass
from batchgen_beam.storage.totals import RunTotals
from batchgen_beam.storage.unit_records import read_record
from batchgen_beam.storage.units import Placement
from batchgen_beam.transforms.publish import UnitReport

__all__ = ["CountRepeatedIds", "FinishPass", "FinishRun", "check_totals"]

IN_RUN = "in this run"
FOUND = "found in the folder"


def _id_of(placed: tuple[str, Placement]) -> str:
    return RowKey.parse(placed[0]).uuid


def _once(uuid: str) -> tuple[str, int]:
    return uuid, 1


def _repeated(counted: tuple[str, int]) -> Iterator[RunTotals]:
    _, rows = counted
    if rows > 1:
        yield RunTotals(repeated_ids=1, repeated_id_rows=rows)


class CountRepeatedIds(beam.PTransform):
    """(row key text, Placement), and ids of other rows -> RunTotals of ids that occur more than once, in any units."""

    def expand(self, inputs: tuple[beam.PCollection, beam.PCollection]) -> beam.PCollection:
        """`inputs` are the placements and the ids."""
        placements, ids = inputs
        return (
            (placements | "Ids" >> beam.Map(_id_of).with_output_types(str), ids)
            | "AllIds" >> beam.Flatten()
            | "Once" >> beam.Map(_once).with_output_types(tuple[str, int])
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


def check_totals(totals: RunTotals, rows: int | None) -> RunTotals:
    """The totals, if they hold every row of the input (`rows`, None: not known) and each is published once."""
    if rows is not None and totals.rows != rows:
        raise PublishError(f"the input files hold {rows} rows, but {totals.rows} were read")
    if not totals.balanced:
        raise PublishError(f"{totals.rows} rows were read, but {totals.results} results and {totals.failed} "
                           "failures were published")
    return totals


def check_own(output: str, content: str | None) -> None:
    """Stop, with a `PublishError`, where the folder was claimed for another content print since this run began.

    `content` is the digest of this run's print; None checks nothing.  `_SUCCESS` goes first: this run may have
    replaced units of the other, also of one that has finished.
    """
    if content is None:
        return
    claimed = read_fingerprint(output)
    if claimed is None or claimed.digest != content:
        remove(join(output, SUCCESS_FILE))
        other = "none" if claimed is None else claimed.digest
        raise PublishError(f"another run has begun in {output} under other content (print {other}, this run's is "
                           f"{content}): the answers there may be of either. Run the one that you want again, alone, "
                           "with --new-fingerprint, or give each its own --output")


class WritePass(beam.DoFn):
    """The one element of the sum, where the launcher finds it."""

    def __init__(self, output: str, run: str, number: int) -> None:
        self._output = output
        self._run = run
        self._number = number

    def process(self, totals: RunTotals) -> Iterator[RunTotals]:
        """The sum again, once it is stored."""
        write_pass(self._output, self._run, self._number, totals)
        yield totals


class FinishPass(beam.PTransform):
    """Collections of RunTotals -> the sum, once it is stored for the end of the run (`read_passes`)."""

    def __init__(self, output: str, run: str, number: int) -> None:
        super().__init__()
        self._write = WritePass(output, run, number)

    def expand(self, inputs: Sequence[beam.PCollection]) -> beam.PCollection:
        """See the class."""
        return (
            inputs
            | "AllTotals" >> beam.Flatten()
            | "Sum" >> beam.CombineGlobally(SumTotals())
            | "WritePass" >> beam.ParDo(self._write).with_output_types(RunTotals))


class ListPublished(beam.DoFn):
    """The checked sum -> (published name, FOUND) of every unit that has files now, or that this run has set aside.

    The latter were found by an earlier attempt: a retried stage counts them again.
    """

    def __init__(self, output: str, run: str, content: str | None = None) -> None:
        self._output = output
        self._content = content
        self._folders = (output, stale_folder(output, run))

    def process(self, totals: RunTotals) -> Iterator[tuple[str, str]]:
        """`totals` only says that every unit of the run is published."""
        check_own(self._output, self._content)
        for folder in self._folders:
            for name in published_names(folder):
                yield name, FOUND


class SetAside(beam.DoFn):
    """(published name, marks) -> `stale_units`; units of this run stay, others go to its stale folder.

    A unit of this run must have its record, under this run's content print (None: any).
    """

    def __init__(self, output: str, run: str, content: str | None = None) -> None:
        self._output = output
        self._run = run
        self._content = content

    def process(self, group: tuple[str, Iterable[str]]) -> Iterator[RunTotals]:
        """One for each unit that is not in this run; safe to repeat."""
        name, marks = group[0], set(group[1])
        if IN_RUN not in marks:
            set_aside(self._output, self._run, name)
            yield RunTotals(stale_units=1)
        else:
            self._check(name, there=FOUND in marks or is_published(self._output, name))

    def _check(self, name: str, *, there: bool) -> None:
        record = read_record(self._output, name)
        if record is None or not there:
            raise PublishError(f"unit {name} was published and is gone from {self._output}: another run with other "
                               "inputs works on that folder. Run this one again when it has ended")
        if self._content not in (None, record.content):
            raise PublishError(f"unit {name} of {self._output} holds answers of run {record.run} under other content "
                               f"(print {record.content}, this run's is {self._content}): two runs work on that "
                               "folder. Run this one again when the other has ended, or give each its own --output")


class WriteRun(beam.DoFn):
    """The one element of the sum becomes the run's files."""

    def __init__(self, output: str, run: str, facts: Mapping[str, object], clock: Callable[[], float],
                 content: str | None = None) -> None:
        self._output = output
        self._run = run
        self._content = content
        self._facts = dict(facts)
        self._clock = clock

    def process(self, totals: RunTotals) -> Iterator[RunTotals]:
        """The sum again, once `_SUCCESS` stands."""
        finished = datetime.fromtimestamp(self._clock(), UTC).isoformat(timespec="seconds")
        check_own(self._output, self._content)
        finish_run(self._output, run_report(self._run, {**self._facts, "finished": finished}, totals))
        yield totals


def _in_run(report: UnitReport) -> tuple[str, str]:
    return report[0], IN_RUN


class FinishRun(beam.PTransform):
    """UnitReports, then collections of RunTotals -> the sum, once `_runs/<run>.json`, `run.json`, `_SUCCESS` stand.

    `rows` is what the input's footers promise (None: not known); `facts` is what else the report says (JSON values);
    `clock` gives seconds since the epoch; `content` is the digest under which the run claimed the folder (None: it
    claimed none).  No unit at all is a finished run of zero rows.  Units that an earlier run published and this one did
    not are moved to `_stale/<run>/` first.
    """

    def __init__(self, output: str, run: str, facts: Mapping[str, object], *, rows: int | None,
                 clock: Callable[[], float], content: str | None = None) -> None:
        super().__init__()
        self._content = content
        self._output = output
        self._run = run
        self._rows = rows
        self._write = WriteRun(output, run, facts, clock, content)

    def expand(self, inputs: Sequence[beam.PCollection]) -> beam.PCollection:
        """See the class."""
        units, *others = inputs
        checked = (
            (units | "UnitTotals" >> beam.Values(), *others)
            | "AllTotals" >> beam.Flatten()
            | "Sum" >> beam.CombineGlobally(SumTotals())
            | "CheckTotals" >> beam.Map(check_totals, self._rows).with_output_types(RunTotals))
        return (
            (checked, self._stale_units(units, checked))
            | "WithStale" >> beam.Flatten()
            | "SumAll" >> beam.CombineGlobally(SumTotals())
            | "WriteRun" >> beam.ParDo(self._write).with_output_types(RunTotals))

    def _stale_units(self, units: beam.PCollection, checked: beam.PCollection) -> beam.PCollection:
        in_run = units | "InRun" >> beam.Map(_in_run).with_output_types(tuple[str, str])
        found = checked | "ListPublished" >> beam.ParDo(ListPublished(self._output, self._run, self._content)
        ).with_output_types(tuple[str, str])
        return (
            (in_run, found)
            | "Units" >> beam.Flatten()
            | "ByUnit" >> beam.GroupByKey()
            | "SetAside" >> beam.ParDo(SetAside(self._output, self._run, self._content)).with_output_types(RunTotals))
