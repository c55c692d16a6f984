"""transformers' continuous batching.

Settings: attention (paged|sdpa, paged|eager), page_tokens, batched_tokens, prefix_caching.
The number of blocks follows from the memory for the KV cache: what it is found from otherwise is a GPU's memory.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.generation import ContinuousBatchingConfig


class Continuous:
    """One model and one manager, whose thread runs from the first call to the end."""

    def __init__(self, job: dict[str, Any]) -> None:
        torch.set_num_threads(job["threads"])
        settings = job["settings"]
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=torch.bfloat16, attn_implementation=settings["attention"]).eval()
        config = self.model.config
        token_bytes = 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        self.options = {
            "page_size": settings["page_tokens"], "max_batch_tokens": settings["batched_tokens"],
            "num_blocks": (job["kv_gib"] << 30) // (token_bytes * settings["page_tokens"]),
            "max_requests_per_batch": job["active_rows"], "allow_block_sharing": settings["prefix_caching"],
            "use_cuda_graph": False}
        self.attention = settings["attention"]
        generation = transformers.GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=job["max_context"])
        self.manager = self.model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=ContinuousBatchingConfig(**self.options))
        self.manager.start()
        self.requests = 0

    def generate(self, rows: list[dict[str, Any]]) -> list[list[int]]:
        """Ids of each row; no id ends a row."""
        names = [f"row-{self.requests + number}" for number in range(len(rows))]
        self.requests += len(rows)
        for name, row in zip(names, rows, strict=True):
            self.manager.add_request(row["prompt_ids"], request_id=name, max_new_tokens=row["max_tokens"],
                                     eos_token_id=-1)
        answers: dict[str, list[int]] = {}
        while len(answers) < len(rows):
            result = self.manager.get_result(timeout=5)
            if result is None:
                if not self.manager.is_running():
                    raise SystemExit("the continuous batching thread ended early")
                continue
            if result.error:
                raise SystemExit(f"{result.request_id}: {result.error}")
            if result.is_finished():
                answers[result.request_id] = list(result.generated_tokens)
        return [answers[name] for name in names]

    def facts(self) -> dict[str, Any]:
        """Versions and settings."""
        return {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": "bfloat16",
                "attention": self.attention, **self.options}

    def close(self) -> None:
        """Stop the manager's thread."""
        self.manager.stop(block=True, timeout=10)


def load(job: dict[str, Any]) -> Continuous:
    """The model of this job."""
    return Continuous(job)
