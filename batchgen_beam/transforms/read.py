"""Input files to rows: each (file, row group) is read by one worker, which also says where its rows belong.

Owns the three outputs and how work is spread.  Does not know file formats (`batchgen_beam.storage`), nor what rows ask.
Beam's own readers give neither row group nor row number, and decode row groups as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import apache_beam as beam
from apache_beam.pvalue import PBegin, TaggedOutput

from batchgen_beam.records import InputRow
from batchgen_beam.settings import InputColumns
from batchgen_beam.storage.inputs import InputFile, InputPlan, ReadTask, read_task
from batchgen_beam.storage.unit_reader import UNIT_ROWS, read_units
from batchgen_beam.storage.units import Manifest, Placement, unit_text

__all__ = ["ReadOutputs", "ReadShards"]

ROWS = "rows"
PLACEMENTS = "placements"
MANIFESTS = "manifests"


class ReadOutputs(NamedTuple):
    """Rows; (row key text, Placement) for each of them; (unit text, Manifest) for each output unit.

    Equal row keys give several rows and placements; whoever answers may answer once.
    """

    rows: beam.PCollection
    placements: beam.PCollection
    manifests: beam.PCollection


class ReadRowGroup(beam.DoFn):
    """The rows of one row group or JSONL file, in order."""

    def __init__(self, plan: InputPlan, columns: InputColumns, unit_rows: int) -> None:
        self._kept = plan.kept
        self._columns = columns
        self._unit_rows = unit_rows

    def process(self, task: ReadTask) -> Iterator[InputRow | TaggedOutput]:
        """Every row on the main output, its placement and the units' manifests on the tagged ones."""
        batches = read_task(task, self._columns, self._kept)
        for item in read_units(batches, task.uri, task.row_group, id_column=self._columns.id,
                               unit_rows=self._unit_rows):
            if isinstance(item, Manifest):
                yield TaggedOutput(MANIFESTS, (unit_text(item.unit), item))
            else:
                row, placement = item
                yield row
                yield TaggedOutput(PLACEMENTS, (row.key.text, placement))


class ReadShards(beam.PTransform):
    """The planned files -> rows, placements, manifests.  `unit_rows` is part of the published names."""

    def __init__(self, plan: InputPlan, columns: InputColumns, *, unit_rows: int = UNIT_ROWS) -> None:
        super().__init__()
        self._plan = plan
        self._columns = columns
        self._unit_rows = unit_rows

    def expand(self, begin: PBegin) -> ReadOutputs:
        """See the class."""
        read = beam.ParDo(ReadRowGroup(self._plan, self._columns, self._unit_rows)).with_output_types(
            InputRow, placements=tuple[str, Placement], manifests=tuple[str, Manifest])
        outputs = (
            begin
            | "Files" >> beam.Create(self._plan.files)
            | "RowGroups" >> beam.FlatMap(InputFile.tasks).with_output_types(ReadTask)
            | "Spread" >> beam.Reshuffle()
            | "ReadRowGroup" >> read.with_outputs(PLACEMENTS, MANIFESTS, main=ROWS))
        return ReadOutputs(outputs[ROWS], outputs[PLACEMENTS], outputs[MANIFESTS])
