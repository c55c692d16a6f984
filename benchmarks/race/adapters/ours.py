"""batchgen-beam's engine as `benchmarks.workload` sets it up.  Setting: kernels (auto, native, torch)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from batchgen_beam.config.model_registry import load_config
from batchgen_beam.records import Answer, Prompt, RowKey, SamplingParams, token_array
from batchgen_beam.settings import EngineSettings
from batchgen_beam.transforms.timed_engine import timed_engine, timed_kernels
from batchgen_beam.weights.loader import load_model
from benchmarks.workload import outcomes


class Ours:
    """One engine; the rows of each call get a uuid of their own."""

    def __init__(self, job: dict[str, Any]) -> None:
        folder = Path(job["model"])
        self.kernels = timed_kernels(load_config(str(folder)), kernels=job["settings"].get("kernels", "auto"),
                                     threads=job["threads"], cache=Path(job["home"]))
        self.settings = EngineSettings(dtype="bfloat16", max_rows=job["active_rows"], kv_memory=job["kv_gib"] << 30,
                                       max_context=job["max_context"])
        self.engine = timed_engine(load_model(folder, self.kernels), self.kernels, self.settings)
        self.calls = 0

    def generate(self, rows: Sequence[dict[str, Any]]) -> list[list[int]]:
        """Ids of each row; a row that fails ends the run."""
        self.calls += 1
        for number, row in enumerate(rows):
            self.engine.submit(Prompt(
                key=RowKey(f"{self.calls}-{number}", "race"), token_ids=token_array(row["prompt_ids"]),
                params=SamplingParams(temperature=0.0, max_tokens=row["max_tokens"])))
        answers: list[Answer] = []
        while self.engine.step():
            answers += self.engine.poll()
        answers += self.engine.poll()
        ids = {outcome.key.uuid: list(outcome.token_ids) for outcome in outcomes(answers)}
        return [ids[f"{self.calls}-{number}"] for number in range(len(rows))]

    def facts(self) -> dict[str, Any]:
        """Kernels, instruction path and budgets."""
        stats = self.engine.stats()
        return {**self.kernels.facts(), "max_rows": self.settings.max_rows, "step_tokens": self.settings.step_tokens,
                "steps": stats.steps, "evictions": stats.evictions, "recomputed_tokens": stats.recomputed_tokens}

    def close(self) -> None:
        """Nothing is left behind."""


def load(job: dict[str, Any]) -> Ours:
    """The engine of this job."""
    return Ours(job)
