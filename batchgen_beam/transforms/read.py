"""Input files to rows: each (file, row group) is read by one worker, which also says where its rows belong.

Owns the outputs, how work is spread, and that units which an earlier run published from the same rows stay as they are.
Does not know file formats (`batchgen_beam.storage`), nor what rows ask.
Beam's own readers give neither row group nor row number, and decode row groups as a whole.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import apache_beam as beam
from apache_beam.pvalue import PBegin, TaggedOutput

from batchgen_beam.records import InputRow, RowKey
from batchgen_beam.settings import InputColumns
from batchgen_beam.storage.inputs import InputFile, InputPlan, ReadTask, read_task
from batchgen_beam.storage.raw_rows import RawBatch
from batchgen_beam.storage.totals import RunTotals
from batchgen_beam.storage.unit_reader import UNIT_ROWS, read_manifests, read_units
from batchgen_beam.storage.unit_records import UnitRecord, UnitRecords
from batchgen_beam.storage.units import Manifest, Placement, published_name, unit_text
from batchgen_beam.transforms.host import HostHandle
from batchgen_beam.transforms.publish import UnitReport

__all__ = ["ReadOutputs", "ReadShards", "Reuse"]

ROWS = "rows"
PLACEMENTS = "placements"
MANIFESTS = "manifests"
SKIPPED = "skipped"
SKIPPED_IDS = "skipped_ids"


class ReadOutputs(NamedTuple):
    """Rows; (row key text, Placement) for each of them; (unit text, Manifest) for each output unit that they are of.

    Units that stay as they are have neither: `skipped` has their UnitReports, `skipped_ids` the id of each of their
    rows.  Equal row keys give several rows and placements; whoever answers may answer once.
    """

    rows: beam.PCollection
    placements: beam.PCollection
    manifests: beam.PCollection
    skipped: beam.PCollection
    skipped_ids: beam.PCollection


@dataclass(frozen=True, slots=True)
class Reuse:
    """What lets units stay as they are: their records, and where their rows are counted as done (None: nowhere)."""

    records: UnitRecords
    handle: HostHandle | None = None


class ReadRowGroup(beam.DoFn):
    """The rows of one row group or JSONL file, in order."""

    def __init__(self, plan: InputPlan, columns: InputColumns, unit_rows: int, reuse: Reuse | None) -> None:
        self._kept = plan.kept
        self._columns = columns
        self._unit_rows = unit_rows
        self._reuse = reuse

    def setup(self) -> None:
        """Whoever counts rows in this process."""
        handle = None if self._reuse is None else self._reuse.handle
        self._host = None if handle is None else handle.acquire()

    def process(self, task: ReadTask) -> Iterator[InputRow | TaggedOutput]:
        """Every row on the main output, its placement and the units' manifests on the tagged ones.

        Where units have records, the rows are read twice: at first for the digests alone.
        """
        unchanged, complete = yield from self._skip(task)
        if complete:
            return
        for item in read_units(self._batches(task), task.uri, task.row_group, **self._cut()):
            if isinstance(item, Manifest):
                if unit_text(item.unit) not in unchanged:
                    yield TaggedOutput(MANIFESTS, (unit_text(item.unit), item))
            elif item[1].unit not in unchanged:
                row, placement = item
                yield row
                yield TaggedOutput(PLACEMENTS, (row.key.text, placement))

    def _batches(self, task: ReadTask) -> Iterator[RawBatch]:
        return read_task(task, self._columns, self._kept)

    def _cut(self) -> dict[str, Any]:
        return {"id_column": self._columns.id, "unit_rows": self._unit_rows}

    def _skip(self, task: ReadTask) -> Generator[TaggedOutput, None, tuple[set[str], bool]]:
        """Report the units that stay as they are; gives their unit texts, and whether those are all."""
        records = self._reusable(task)
        unchanged: set[str] = set()
        if self._reuse is None or not records:
            return unchanged, False
        units = 0
        for manifest in read_manifests(self._batches(task), task.uri, task.row_group, **self._cut()):
            units += 1
            record = records.get(published_name(manifest.unit))
            if record is not None and record.digest == self._reuse.records.digest(manifest.digest):
                unchanged.add(unit_text(manifest.unit))
                yield from self._report(manifest, self._reuse.records.kept(record))
        return unchanged, len(unchanged) == units

    def _reusable(self, task: ReadTask) -> dict[str, UnitRecord]:
        if self._reuse is None:
            return {}
        slices = None if task.rows is None else -(-task.rows // self._unit_rows)
        return self._reuse.records.reusable(task.uri, task.row_group, slices)

    def _report(self, manifest: Manifest, totals: RunTotals) -> Iterator[TaggedOutput]:
        yield TaggedOutput(SKIPPED, (published_name(manifest.unit), totals))
        for key in manifest.keys:
            yield TaggedOutput(SKIPPED_IDS, RowKey.parse(key).uuid)
        if self._host is not None:
            self._host.tally.reuse(totals.rows)


class ReadShards(beam.PTransform):
    """The planned files -> ReadOutputs.

    `unit_rows` is part of the published names.  `reuse` None: no unit is skipped.
    """

    def __init__(self, plan: InputPlan, columns: InputColumns, *, unit_rows: int = UNIT_ROWS,
                 reuse: Reuse | None = None) -> None:
        super().__init__()
        self._plan = plan
        self._step = ReadRowGroup(plan, columns, unit_rows, reuse)

    def expand(self, begin: PBegin) -> ReadOutputs:
        """See the class."""
        read = beam.ParDo(self._step).with_output_types(
            InputRow, placements=tuple[str, Placement], manifests=tuple[str, Manifest], skipped=UnitReport,
            skipped_ids=str)
        outputs = (
            begin
            | "Files" >> beam.Create(self._plan.files)
            | "RowGroups" >> beam.FlatMap(InputFile.tasks).with_output_types(ReadTask)
            | "Spread" >> beam.Reshuffle()
            | "ReadRowGroup" >> read.with_outputs(PLACEMENTS, MANIFESTS, SKIPPED, SKIPPED_IDS, main=ROWS))
        return ReadOutputs(outputs[ROWS], outputs[PLACEMENTS], outputs[MANIFESTS], outputs[SKIPPED],
                           outputs[SKIPPED_IDS])
