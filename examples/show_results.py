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
    """Results in the order of their rows, then failures; exits with 2 where there is nothing of that kind to show."""
    results, failures = [sorted((output / part).rglob("rg-*.parquet")) for part in ("results", "failures")]
    if not results and not failures:
        refuse(f"{output} holds no results and no failures; give the folder that was --output of a run")
    for path in results:
        show_answers(pq.ParquetFile(path), names)
    for path in failures:
        for row in pq.ParquetFile(path).read(columns=FAILURE).to_pylist():
            shard = row["shard"].rpartition("/")[2]
            print(f"{shard}, row group {row['row_group']}, row {row['row']}: {row['code']}: {row['message']}")


def show_answers(file: pq.ParquetFile, names: list[str]) -> None:
    """The answers of one file."""
    columns = file.schema_arrow.names
    missing = [name for name in names if name not in columns]
    if missing:
        refuse(f"the results have no column {', '.join(missing)}; they have {', '.join(columns)}")
    for row in file.read(columns=[*names, "finish_reason", "text"]).to_pylist():
        name = "  ".join(f"{row[column]!s:<14}" for column in names)
        print(f"{name} {row['finish_reason']:<7} {json.dumps(row['text'], ensure_ascii=False)}")


def refuse(message: str) -> None:
    """End with one line that says what is wrong."""
    print(f"show_results: {message}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        refuse("name an output folder: show_results.py OUTPUT [COLUMN ...]")
    show(Path(sys.argv[1]), sys.argv[2:] or ["uuid"])
