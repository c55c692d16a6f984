"""Whole runs of the command over small Parquet files and the fake model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).parents[2]

FLAGS = ("--dtype=float32", "--threads=1", "--max-rows=8", "--step-tokens=128", "--kv-memory=4MiB", "--temperature=0",
         "--max-tokens=16")


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], *, row_group_size: int = 1000) -> Path:
    """A Parquet file with the union of the rows' keys as columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


def questions(count: int, *, start: int = 0) -> list[dict[str, Any]]:
    """Rows that the fake model answers."""
    return [{"uuid": f"id-{index}", "prompt": f"question {index}: " + "why? " * (index % 40)}
            for index in range(start, start + count)]


def run_flags(source: Path | str, output: Path | str, model: Path, *more: str) -> list[str]:
    """The arguments of a small run."""
    return ["run", f"--input={source}", f"--output={output}", f"--model={model}", *FLAGS, *more]


def command(arguments: Sequence[str], folder: Path) -> subprocess.Popen[str]:
    """The console script as a process of its own; whoever starts it ends it."""
    return subprocess.Popen(
        [sys.executable, "-m", "batchgen_beam.pipelines.main", *arguments], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})


def report(output: Path) -> dict[str, Any]:
    """The run's report."""
    found: dict[str, Any] = json.loads((output / "run.json").read_text())
    return found


def engine_figures(output: Path) -> dict[str, Any]:
    """What the engines of the latest run did."""
    found: dict[str, Any] = json.loads((output / "_runs" / f"{report(output)['run']}.engine.json").read_text())
    return found


def published(output: Path, kind: str = "results") -> list[dict[str, Any]]:
    """All rows of the published files, files by name, rows as they stand."""
    files = sorted(path for path in (output / kind).rglob("rg-*.parquet") if path.is_file())
    return [row for path in files for row in pq.read_table(path).to_pylist()]


def timeless(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows without what may differ between two runs: times, and what a row found computed."""
    return [{name: value for name, value in row.items() if not name.endswith("_seconds") and name != "cached_tokens"}
            for row in rows]
