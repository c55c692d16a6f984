"""OpenVINO GenAI's continuous batching on the CPU.

Settings: precision (of arithmetic: bf16, or f32 for processors without bfloat16), kv (bf16, f32, u8; the CPU plugin's
own default is u8), batched_tokens (its default is 256), prefix_caching, and
lead: the first row begins alone.  A request looks for cached blocks when it is added, so of requests that are all added
at once none finds a prefix; behind a leader all do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import openvino_genai


class OpenVino:
    """One pipeline; the requests of one call are added before the first step, or once the leader's prompt is done."""

    def __init__(self, job: dict[str, Any]) -> None:
        settings = job["settings"]
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = job["kv_gib"]
        scheduler.max_num_seqs = job["active_rows"]
        scheduler.max_num_batched_tokens = settings["batched_tokens"]
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = settings["prefix_caching"]
        self.properties = {"INFERENCE_NUM_THREADS": job["threads"], "INFERENCE_PRECISION_HINT": settings["precision"],
                           "KV_CACHE_PRECISION": settings["kv"]}
        self.lead = settings["lead"]
        self.scheduler = scheduler
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(job["model"], scheduler, "CPU", self.properties)
        self.requests = 0

    def generate(self, rows: list[dict[str, Any]]) -> list[list[int]]:
        """Ids of each row; the end-of-sequence id is passed over."""
        handles = []
        for row in rows:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.do_sample, config.ignore_eos = row["max_tokens"], False, True
            config.stop_token_ids, config.eos_token_id = set(), -1
            prompt = openvino.Tensor(np.array([row["prompt_ids"]], dtype=np.int64))
            handles.append(self.pipeline.add_request(self.requests, prompt, config))
            self.requests += 1
            while self.lead and len(handles) == 1 and not handles[0].can_read():
                self.pipeline.step()
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
        return [list(handle.read_all()[0].generated_ids) for handle in handles]

    def facts(self) -> dict[str, Any]:
        """Versions and every setting that was given."""
        return {"openvino_genai": openvino_genai.__version__, "openvino": openvino.__version__, **self.properties,
                "lead": self.lead, "scheduler": " ".join(self.scheduler.to_string().split())}

    def close(self) -> None:
        """The process ends with it."""


def load(job: dict[str, Any]) -> OpenVino:
    """The pipeline of this job."""
    return OpenVino(job)
