"""Rows as the two readers hand them on, before they have an identity.

Owns the shape that Parquet and JSONL share.  Does not know either format, nor keys and units.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from batchgen_beam.settings import PARAMETER_COLUMNS, UNSUPPORTED_COLUMNS, InputColumns

__all__ = ["RawBatch", "RawRow", "asked_columns"]


def asked_columns(columns: InputColumns) -> dict[str, str]:
    """File column -> canonical name, for every column that decides an answer."""
    named = {columns.prompt: "prompt", columns.messages: "messages", columns.token_ids: "token_ids"}
    parameters = (name for name in (*PARAMETER_COLUMNS, *UNSUPPORTED_COLUMNS) if name not in columns.ignore)
    return {**{name: name for name in parameters}, **named}


@dataclass(frozen=True, slots=True)
class RawRow:
    """One input row.  `row` counts within the row group, or is the line's number from 0.

    `has_id` False: the file has no id column.  `values` has canonical names and no nulls.  `problem` says why the
    row can't be read; `line` is then its content.
    """

    row: int
    has_id: bool
    id_value: object
    values: dict[str, object]
    problem: str | None = None
    line: bytes | None = None


@dataclass(frozen=True, slots=True)
class RawBatch:
    """Consecutive rows and, where columns are kept, the same rows of those."""

    rows: list[RawRow]
    kept: pa.RecordBatch | None = None

    def cut(self, start: int, count: int) -> RawBatch:
        """A part of the batch, without copying the kept columns."""
        kept = None if self.kept is None else self.kept.slice(start, count)
        return RawBatch(self.rows[start : start + count], kept)
