"""batchgen-beam's engine as `benchmarks.workload` sets it up.  Setting: kernels (auto, native, torch)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from batchgen_beam.config.model_registry import load_config
from batchgen_beam.engine.engine import Engine
from batchgen_beam.engine.stats import EngineFacts
from batchgen_beam.kernels.choice import choose_kernels
from batchgen_beam.records import Answer, Failure, Prompt, RowKey, SamplingParams, token_array
from batchgen_beam.settings import EngineSettings
from batchgen_beam.transforms.model_shapes import model_shapes
from batchgen_beam.weights.loader import load_model


class Ours:
    """One engine; the rows of each call get a uuid of their own."""

    def __init__(self, job: dict[str, Any]) -> None:
        torch.set_num_threads(job["threads"])
        folder, cache = Path(job["model"]), Path(job["home"])
        shapes = model_shapes(load_config(str(folder)))
        self.kernels = choose_kernels(torch.bfloat16, shapes, wanted=job["settings"].get("kernels", "auto"),
                                      threads=job["threads"], cache=cache)
        model = load_model(folder, self.kernels)
        self.settings = EngineSettings(dtype="bfloat16", max_rows=job["active_rows"], kv_memory=job["kv_gib"] << 30,
                                       max_context=job["max_context"])
        facts = EngineFacts(eos_ids=frozenset(), text_vocabulary=model.vocab_size, content_print="", numeric_print="")
        self.engine = Engine(model, self.kernels, self.settings, facts)
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
        ids: dict[str, list[int]] = {}
        for answer in answers:
            if isinstance(answer, Failure):
                raise SystemExit(f"row {answer.key.uuid} failed: {answer.code}: {answer.message}")
            ids[answer.key.uuid] = list(answer.token_ids)
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
