"""Inputs and results of jobs in an object store."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen_beam.storage.files import list_below, read_bytes


def stored_rows(output: str) -> list[dict[str, Any]]:
    """All rows of the results below an output folder, files by name."""
    names = list_below(f"{output}/results", "**.parquet")
    tables = [pq.read_table(io.BytesIO(read_bytes(f"{output}/results/{name}"))) for name in names]
    return [row for table in tables for row in table.to_pylist()]


def parquet_bytes(rows: Sequence[dict[str, Any]], *, row_group_size: int = 1000) -> bytes:
    """The rows as a file."""
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(list(rows)), sink, row_group_size=row_group_size)
    return sink.getvalue()
