"""Shows an output folder: each answer and each failure on a line.

    python examples/show_results.py OUTPUT [COLUMN ...]      the columns that name a row, uuid if none is given
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq

FAILURE = ["shard", "row_group", "row", "code", "message"]


def show(output: Path, names: list[str]) -> None:
    """Results in the order of their rows, then failures."""
    for path in sorted((output / "results").rglob("rg-*.parquet")):
        for row in pq.ParquetFile(path).read(columns=[*names, "finish_reason", "text"]).to_pylist():
            name = "  ".join(f"{row[column]!s:<14}" for column in names)
            print(f"{name} {row['finish_reason']:<7} {json.dumps(row['text'], ensure_ascii=False)}")
    for path in sorted((output / "failures").rglob("rg-*.parquet")):
        for row in pq.ParquetFile(path).read(columns=FAILURE).to_pylist():
            shard = row["shard"].rpartition("/")[2]
            print(f"{shard}, row group {row['row_group']}, row {row['row']}: {row['code']}: {row['message']}")


if __name__ == "__main__":
    show(Path(sys.argv[1]), sys.argv[2:] or ["uuid"])
