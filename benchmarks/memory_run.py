"""Peak memory and speed of a large run on the local runner, with the fake model: what the pipeline itself costs.

    python -m benchmarks.memory_run --rows 200000 --folder out/memory

Writes the input (prompts of 200 tokens, answers of 50), runs `batchgen-beam run` as a process of its own, prints its
peak resident memory, rows per second and the counts of the report.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.fake_folder import write_fake_folder

PROMPT_TOKENS = 200
ANSWER_TOKENS = 50
ROWS_PER_FILE = 20_000
WORDS = ("batch", "window", "shard", "lane", "bundle", "prompt", "answer", "token", "page", "row")


def prompts(first: int, count: int) -> Iterator[str]:
    """Texts of `PROMPT_TOKENS` - 1 bytes: with its BOS each is as many tokens as the workload says."""
    for index in range(first, first + count):
        draw = random.Random(index)
        text = f"{index}: " + " ".join(draw.choice(WORDS) for _ in range(PROMPT_TOKENS // 4))
        yield text[: PROMPT_TOKENS - 1].ljust(PROMPT_TOKENS - 1, ".")


def write_input(folder: Path, rows: int) -> None:
    """Parquet files of 20,000 rows in row groups of 5,000."""
    folder.mkdir(parents=True, exist_ok=True)
    for first in range(0, rows, ROWS_PER_FILE):
        count = min(ROWS_PER_FILE, rows - first)
        table = pa.table({"uuid": [f"row-{index:07d}" for index in range(first, first + count)],
                          "prompt": list(prompts(first, count))})
        pq.write_table(table, folder / f"part-{first // ROWS_PER_FILE:03d}.parquet", row_group_size=5_000)


def run(folder: Path, flags: list[str]) -> tuple[float, int]:
    """Run the command; seconds it took, and the peak resident bytes of the largest process of the run."""
    command = [sys.executable, "-m", "batchgen_beam.pipelines.main", "run", f"--input={folder}/in/*.parquet",
               f"--output={folder}/out", f"--model={folder}/model", "--dtype=float32", "--temperature=0",
               f"--max-tokens={ANSWER_TOKENS}", "--max-rows=1024", "--step-tokens=4096", *flags]
    started = time.monotonic()
    subprocess.run(command, check=True)
    return time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--folder", type=Path, default=Path("out/memory"))
    given, flags = parser.parse_known_args()
    write_fake_folder(given.folder / "model", eos_every=0)
    write_input(given.folder / "in", given.rows)
    seconds, peak = run(given.folder, flags)
    counts = json.loads((given.folder / "out" / "run.json").read_text())["counts"]
    print(f"{given.rows} rows in {seconds:.0f} s, {given.rows / seconds:.0f} rows/s, peak {peak / 2**30:.2f} GiB")
    print(f"rows {counts['rows']}, results {counts['results']}, prompt tokens {counts['prompt_tokens']}, "
          f"answer tokens {counts['completion_tokens']}")


if __name__ == "__main__":
    main()
