"""Raw rows to identified rows: keys, places and the manifest of each output unit.

Owns the cutting of a row group into units and the counting of ranks.  Does not know file formats or Beam.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat

import pyarrow as pa

from batchgen_beam.records import InputRow, OutputUnit, RowKey
from batchgen_beam.storage.arrow_values import python_values
from batchgen_beam.storage.raw_rows import RawBatch, RawRow
from batchgen_beam.storage.row_identity import RowsDigest, positional_id, row_digest, row_id
from batchgen_beam.storage.units import Manifest, Placement, unit_text

__all__ = ["UNIT_ROWS", "PlacedRow", "read_manifests", "read_units"]

UNIT_ROWS = 10_000
"""Rows of one output unit at most."""

PlacedRow = tuple[InputRow, Placement]


@dataclass(slots=True)
class _OpenUnit:
    """The unit that is being filled."""

    unit: OutputUnit
    id_column: str
    carries_kept: bool
    keys: list[str] = field(default_factory=list)
    digest: RowsDigest = field(default_factory=RowsDigest)
    kept: list[pa.RecordBatch] = field(default_factory=list)
    kept_schema: str = ""
    key_counts: Counter[str] = field(default_factory=Counter)
    id_counts: Counter[str] = field(default_factory=Counter)

    def add(self, batch: RawBatch) -> Iterator[PlacedRow]:
        for raw, kept in zip(batch.rows, self._kept_values(batch), strict=True):
            yield self._placed(raw, kept)

    def _kept_values(self, batch: RawBatch) -> Iterable[Sequence[object]]:
        if batch.kept is None:
            return repeat((), len(batch.rows))
        self.kept_schema = batch.kept.schema.to_string()
        if self.carries_kept:
            self.kept.append(batch.kept)
        return zip(*(python_values(column) for column in batch.kept.columns), strict=True)

    def _placed(self, raw: RawRow, kept: Sequence[object]) -> PlacedRow:
        row = _input_row(raw, self.unit, self.id_column)
        text = row.key.text
        placement = Placement(unit_text(self.unit), raw.row, self.key_counts[text], self.id_counts[row.key.uuid])
        self.key_counts[text] += 1
        self.id_counts[row.key.uuid] += 1
        self.keys.append(text)
        self.digest.add(raw.row, text, kept)
        return row, placement

    def manifest(self) -> Manifest:
        return Manifest(unit=self.unit, keys=tuple(self.keys), kept=_stream(self.kept),
                        digest=self.digest.hexdigest(self.kept_schema))


def _input_row(raw: RawRow, unit: OutputUnit, id_column: str) -> InputRow:
    uuid, problem = _identified(raw, unit, id_column)
    digest = row_digest(raw.values if raw.line is None else {"line": raw.line})
    return InputRow(key=RowKey(uuid, digest), values=raw.values, problem=problem)


def _identified(raw: RawRow, unit: OutputUnit, id_column: str) -> tuple[str, str | None]:
    problem = raw.problem
    if raw.has_id:
        try:
            return row_id(raw.id_value, id_column), problem
        except ValueError as error:
            problem = problem or str(error)
    return positional_id(unit.shard, unit.row_group, raw.row), problem


def _stream(batches: list[pa.RecordBatch]) -> bytes:
    if not batches:
        return b""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        for batch in batches:
            writer.write_batch(batch)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def read_units(batches: Iterable[RawBatch], shard: str, row_group: int, *, id_column: str,
               unit_rows: int = UNIT_ROWS, carries_kept: bool = True) -> Iterator[PlacedRow | Manifest]:
    """Every row with its place, in order; after the last row of each unit its manifest.  No rows, no unit.

    `carries_kept` False: manifests say what was kept by their digest only.
    """
    current = _OpenUnit(OutputUnit(shard, row_group, 0), id_column, carries_kept)
    for batch in batches:
        start = 0
        while start < len(batch.rows):
            part = batch.cut(start, unit_rows - len(current.keys))
            yield from current.add(part)
            start += len(part.rows)
            if len(current.keys) == unit_rows:
                yield current.manifest()
                unit = OutputUnit(shard, row_group, current.unit.slice_index + 1)
                current = _OpenUnit(unit, id_column, carries_kept)
    if current.keys:
        yield current.manifest()


def read_manifests(batches: Iterable[RawBatch], shard: str, row_group: int, *, id_column: str,
                   unit_rows: int = UNIT_ROWS) -> Iterator[Manifest]:
    """The manifests alone, without what is kept: of a unit nothing but its keys is ever held."""
    for item in read_units(batches, shard, row_group, id_column=id_column, unit_rows=unit_rows, carries_kept=False):
        if isinstance(item, Manifest):
            yield item
