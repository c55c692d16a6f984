"""A job of the fault suite: a tiny Llama, greedy and seeded rows with log-probabilities, the real command over them.

Owns how long the rows run and how the command is started.  Does not know when it is killed or what it must publish.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from batchgen_beam.text.fake_folder import END_ID, START_ID, write_fake_folder
from tests.models.tiny_llama import Tiny
from tests.support.jobs import ROOT, write_rows

__all__ = ["DURABLE", "Ended", "Job", "make_job", "write_tiny_model"]

SLOTS = 8
UNIT_ROWS = 4

DURABLE = ("--flush-interval=0.3", "--checkpoint-interval=0.5", "--compact-after=0", "--progress-interval=0.2")
"""Everything is stored soon, so that a kill costs little and is met often."""

# The slower kernels: the job has to generate for seconds, so that there is something to kill.
_FLAGS = ("--dtype=float32", "--kernels=torch", "--threads=1", f"--max-rows={SLOTS}", "--step-tokens=128",
          "--kv-memory=16MiB", "--lanes=2")


@dataclass(frozen=True, slots=True)
class Ended:
    """A command that has ended: its exit code and messages."""

    code: int
    err: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Input and model below `folder`; any number of outputs.  `module` is what Python is told to run."""

    folder: Path
    rows: int
    units: int
    flags: tuple[str, ...] = _FLAGS + DURABLE
    module: str = "batchgen_beam.pipelines.main"

    def arguments(self, output: Path) -> list[str]:
        """What the command is told."""
        return ["run", f"--input={self.folder}/in/*.parquet", f"--output={output}", f"--model={self.folder}/model",
                *self.flags]

    def start(self, output: Path) -> subprocess.Popen[bytes]:
        """The command in a process group of its own; its messages go to a file beside the output."""
        with self.messages(output).open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", self.module, *self.arguments(output)], cwd=self.folder, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})

    def run(self, output: Path, *, timeout: float = 240) -> Ended:
        """The command from its start to its end."""
        before = self.messages(output).stat().st_size if self.messages(output).exists() else 0
        process = self.start(output)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        return Ended(code, self.messages(output).read_bytes()[before:].decode())

    def messages(self, output: Path) -> Path:
        """Where the messages of all commands over one output are."""
        return output.with_name(f"{output.name}.err")


def write_tiny_model(folder: Path) -> Path:
    """A random Llama of 2 layers whose ids are bytes; sharp logits, so that what it says depends on all it has seen."""
    write_fake_folder(folder)
    torch.manual_seed(7)
    keys = {"vocab_size": START_ID + 1, "num_hidden_layers": 2, "max_position_embeddings": 1024,
            "eos_token_id": END_ID, "bos_token_id": START_ID, "initializer_range": 0.3}
    LlamaForCausalLM(Tiny(keys=keys).config()).save_pretrained(folder)
    return folder


def question(index: int, most: int) -> dict[str, Any]:
    """A row that ends after 60 to 100 % of `most` tokens, or, where it is sampled, at an end id that it meets."""
    return {"uuid": f"id-{index}", "prompt": f"question {index}: " + "why? " * (index * 7 % 40),
            "max_tokens": most * (60 + index * 37 % 41) // 100, "temperature": (0.0, 0.9)[index % 2],
            "seed": index, "logprobs": index % 3}


def make_job(folder: Path, *, rows: int, most: int) -> Job:
    """Rows in two files of units of 4 rows."""
    write_tiny_model(folder / "model")
    questions = [question(index, most) for index in range(rows)]
    half = rows // 2 // UNIT_ROWS * UNIT_ROWS
    for name, part in (("a", questions[:half]), ("b", questions[half:])):
        write_rows(folder / "in" / f"{name}.parquet", part, row_group_size=UNIT_ROWS)
    return Job(folder=folder, rows=rows, units=-(-rows // UNIT_ROWS))


def run_figures(output: Path, runs: Sequence[str]) -> Mapping[str, dict[str, Any]]:
    """What the engines of some runs have done, by run: the last samples of their processes."""
    figures = {}
    for run in runs:
        samples = [json.loads(path.read_text()) for path in sorted((output / "_progress" / run).glob("*.json"))]
        if samples:
            names = ("generated_tokens", "prefilled_tokens", "recomputed_tokens", "resumed_rows", "resumed_tokens")
            figures[run] = {name: sum(sample["engine"][name] for sample in samples) for name in names}
    return figures
