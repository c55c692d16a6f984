"""What Beam costs: how much of the time from its first row to its last step an engine does not compute.

A workload (see `benchmarks.workload`) goes through the whole pipeline as Parquet, on the local runner.  Every row has
to run to its `max_tokens`, so `--eos-id`, the only token that would end one earlier, is one that the model never gives.

    python -m benchmarks.beam_cost --model MODEL --workload FILE --eos-id 7 [--rows N] [--max-rows N] [FLAGS OF run]

Prints one JSON object: `cost` is (span - steps) / span by the engine's own clock, `wall_seconds` is that of the whole
command, with start, load and publication.  A run whose answers have other lengths is refused.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.race.workloads import read

ROW_GROUP = 128


def write_prompts(workload: Path, rows: int | None, file: Path) -> int:
    """The workload as Parquet; returns how many tokens its answers have."""
    found = read(workload).rows[:rows]
    file.parent.mkdir(parents=True)
    pq.write_table(pa.table({"uuid": [row.uuid for row in found],
                             "token_ids": [row.prompt_ids for row in found],
                             "max_tokens": [row.max_tokens for row in found],
                             "temperature": [0.0] * len(found)}), file, row_group_size=ROW_GROUP)
    return sum(row.max_tokens for row in found)


def figures(output: Path) -> dict[str, Any]:
    """What the engine of the run counted."""
    (file,) = (output / "_runs").glob("*.engine.json")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def report(found: Mapping[str, Any], wall: float, max_rows: int) -> dict[str, Any]:
    """What is printed, of a run whose command took `wall` seconds."""
    span, busy = found["span_seconds"], found["busy_seconds"]
    return {"cost": round((span - busy) / span, 4), "span_seconds": round(span, 2), "step_seconds": round(busy, 2),
            "wall_seconds": round(wall, 2), "rows": found["rows_done"], "output_tokens": found["generated_tokens"],
            "steps": found["steps"], "fill": round(found["row_steps"] / found["steps"] / max_rows, 3)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint folder or a GGUF file")
    parser.add_argument("--workload", required=True, type=Path)
    parser.add_argument("--rows", type=int, help="only the first N rows")
    parser.add_argument("--max-rows", type=int, default=128)
    parser.add_argument("--eos-id", type=int, required=True, help="a token that the model never gives")
    args, flags = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        tokens = write_prompts(args.workload, args.rows, folder / "input" / "prompts.parquet")
        started = time.monotonic()
        subprocess.run([sys.executable, "-m", "batchgen_beam.pipelines.main", "run", "--model", args.model, "--input",
                        folder / "input" / "prompts.parquet", "--output", folder / "output",
                        f"--max-rows={args.max_rows}", f"--eos-ids={args.eos_id}", *flags],
                       check=True, stdout=sys.stderr)
        wall = time.monotonic() - started
        found = figures(folder / "output")
    if found["generated_tokens"] != tokens:
        raise SystemExit(f"{found['generated_tokens']} tokens instead of {tokens}: the model gives token {args.eos_id}")
    print(json.dumps(report(found, wall, args.max_rows), indent=1))


if __name__ == "__main__":
    main()
