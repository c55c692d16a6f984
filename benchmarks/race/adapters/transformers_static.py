"""transformers' `generate` on left-padded batches.

Settings: batch (rows), order (`output`: sorted by wanted output length, which is what padding costs least with;
`prompt`: by prompt length; `file`), attention (sdpa, eager).  A batch runs until its longest row is done.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers


class Static:
    """One model."""

    def __init__(self, job: dict[str, Any]) -> None:
        torch.set_num_threads(job["threads"])
        self.settings = job["settings"]
        self.batch = min(self.settings["batch"], job["active_rows"])
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=torch.bfloat16, attn_implementation=self.settings["attention"]).eval()
        self.model.config.eos_token_id = None
        self.model.generation_config = transformers.GenerationConfig(do_sample=False, pad_token_id=0)

    def _order(self, rows: list[dict[str, Any]]) -> list[int]:
        sizes = {"output": lambda row: row["max_tokens"], "prompt": lambda row: len(row["prompt_ids"]),
                 "file": lambda row: 0}
        size = sizes[self.settings["order"]]
        return sorted(range(len(rows)), key=lambda number: -size(rows[number]))

    @torch.inference_mode()
    def _batch(self, rows: list[dict[str, Any]]) -> list[list[int]]:
        width = max(len(row["prompt_ids"]) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for line, row in enumerate(rows):
            start = width - len(row["prompt_ids"])
            ids[line, start:] = torch.tensor(row["prompt_ids"])
            mask[line, start:] = 1
        most = max(row["max_tokens"] for row in rows)
        out = self.model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=most)
        return [out[line, width:width + row["max_tokens"]].tolist() for line, row in enumerate(rows)]

    def generate(self, rows: list[dict[str, Any]]) -> list[list[int]]:
        """Ids of each row; no id ends a row."""
        order = self._order(rows)
        answers: list[list[int]] = [[] for _ in rows]
        for start in range(0, len(order), self.batch):
            chosen = order[start:start + self.batch]
            for number, ids in zip(chosen, self._batch([rows[number] for number in chosen]), strict=True):
                answers[number] = ids
        return answers

    def facts(self) -> dict[str, Any]:
        """Versions and settings."""
        return {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": "bfloat16",
                **self.settings, "batch": self.batch}

    def close(self) -> None:
        """The process ends with it."""


def load(job: dict[str, Any]) -> Static:
    """The model of this job."""
    return Static(job)
