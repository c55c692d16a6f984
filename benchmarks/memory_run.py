"""Peak memory and speed of a large run on the local runner, with the fake model: what the pipeline itself costs.

    python -m benchmarks.memory_run --rows 200000 --folder out/memory

Writes the input (prompts of 200 tokens, answers of 50), runs `batchgen-beam run` as a process of its own, prints its
peak resident memory, rows per second and the counts of the report.  What an earlier run left in the folder is removed.
Needs the benchmark environment (`make bench-setup`).
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen_beam.text.fake_folder import write_fake_folder

PROMPT_TOKENS = 200
ANSWER_TOKENS = 50
ROWS_PER_FILE = 20_000
SAMPLE_SECONDS = 0.1
WORDS = ("batch", "window", "shard", "lane", "bundle", "prompt", "answer", "token", "page", "row")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a run took.  `largest` is the kernel's own peak of the largest process; `tree` the greatest sum over all.

    The sum is sampled ten times a second, and counts pages that processes share once for each of them.
    """

    seconds: float
    largest: int
    tree: int


def prompts(first: int, count: int) -> Iterator[str]:
    """Texts of `PROMPT_TOKENS` - 1 bytes: with its BOS each is as many tokens as the workload says."""
    for index in range(first, first + count):
        draw = random.Random(index)
        text = f"{index}: " + " ".join(draw.choice(WORDS) for _ in range(PROMPT_TOKENS // 4))
        yield text[: PROMPT_TOKENS - 1].ljust(PROMPT_TOKENS - 1, ".")


def write_input(folder: Path, rows: int) -> None:
    """Parquet files of 20,000 rows in row groups of 5,000."""
    folder.mkdir(parents=True)
    for first in range(0, rows, ROWS_PER_FILE):
        count = min(ROWS_PER_FILE, rows - first)
        table = pa.table({"uuid": [f"row-{index:07d}" for index in range(first, first + count)],
                          "prompt": list(prompts(first, count))})
        pq.write_table(table, folder / f"part-{first // ROWS_PER_FILE:03d}.parquet", row_group_size=5_000)


def prepare(folder: Path, rows: int) -> None:
    """A fresh model, input and output: files of an earlier run with more rows would be read and counted too."""
    for name in ("in", "out", "model"):
        shutil.rmtree(folder / name, ignore_errors=True)
    write_fake_folder(folder / "model", eos_every=0)
    write_input(folder / "in", rows)


def resident(process: psutil.Process) -> int:
    """Resident bytes of a process and its descendants; those that have just ended count nothing."""
    total = 0
    for one in (process, *process.children(recursive=True)):
        try:
            total += one.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


def run(folder: Path, flags: list[str]) -> Cost:
    """Run the command to its end; `CalledProcessError` if it stopped or a row failed."""
    command = [sys.executable, "-m", "batchgen_beam.pipelines.main", "run", f"--input={folder}/in/*.parquet",
               f"--output={folder}/out", f"--model={folder}/model", "--dtype=float32", "--temperature=0",
               f"--max-tokens={ANSWER_TOKENS}", "--max-rows=1024", "--step-tokens=4096", *flags]
    started, tree = time.monotonic(), 0
    with subprocess.Popen(command) as child:
        while child.poll() is None:
            tree = max(tree, resident(psutil.Process(child.pid)))
            time.sleep(SAMPLE_SECONDS)
    seconds = time.monotonic() - started
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return Cost(seconds=seconds, largest=largest, tree=tree)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--folder", type=Path, default=Path("out/memory"))
    parser.add_argument("--most-gb", type=float, help="fail if a process took more, in units of 10^9 bytes")
    given, flags = parser.parse_known_args()
    prepare(given.folder, given.rows)
    cost = run(given.folder, flags)
    counts = json.loads((given.folder / "out" / "run.json").read_text())["counts"]
    if counts["failed"] or counts["results"] != given.rows:
        raise SystemExit(f"{given.rows} rows were written, the report says {counts}")
    print(f"{given.rows} rows in {cost.seconds:.0f} s, {given.rows / cost.seconds:.0f} rows/s, "
          f"peak {cost.largest / 2**30:.2f} GiB in one process, {cost.tree / 2**30:.2f} GiB in all")
    if given.most_gb is not None and max(cost.largest, cost.tree) > given.most_gb * 1e9:
        raise SystemExit(f"the peak is over {given.most_gb} GB")
    print(f"rows {counts['rows']}, results {counts['results']}, prompt tokens {counts['prompt_tokens']}, "
          f"answer tokens {counts['completion_tokens']}")


if __name__ == "__main__":
    main()
