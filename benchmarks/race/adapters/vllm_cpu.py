"""vLLM on the CPU, offline.

Settings: dtype (float32 for processors without bfloat16), eager, prefix_caching, batched_tokens (its default for
offline use on a CPU is 4096), preload (libraries that its guide asks to load first: Intel's OpenMP, which comes with
it, and TCMalloc where the machine has it).
Its environment variables are read when vLLM is imported, by the workers that it starts too.
"""

from __future__ import annotations

import ctypes.util
import os
import sys
from pathlib import Path
from typing import Any


def preloads() -> list[str]:
    """What the guide for x86 asks to load first, as far as it is here."""
    found = [str(path) for path in Path(sys.prefix, "lib").glob("libiomp5.so")]
    name = ctypes.util.find_library("tcmalloc_minimal")
    return [*found, *([name] if name else [])]


def environment(job: dict[str, Any]) -> dict[str, str]:
    """Threads bound one to a core, memory of the KV cache, compiled code beside the environments."""
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:job["threads"]])
    return {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": str(job["kv_gib"]),
            "VLLM_CACHE_ROOT": str(Path(job["home"], "vllm-cache")),
            "TORCHINDUCTOR_CACHE_DIR": str(Path(job["home"], "vllm-cache", "inductor")), "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1",
            "LD_PRELOAD": ":".join(preloads()) if job["settings"]["preload"] else ""}


class Vllm:
    """One `LLM`; the prefix cache is emptied before each call."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.environment = environment(job)
        os.environ.update(self.environment)
        from vllm import LLM

        settings = job["settings"]
        self.arguments = {
            "dtype": settings["dtype"], "max_model_len": job["max_context"], "max_num_seqs": job["active_rows"],
            "max_num_batched_tokens": settings["batched_tokens"], "enable_prefix_caching": settings["prefix_caching"],
            "enforce_eager": settings["eager"], "disable_log_stats": True, "seed": 0}
        self.llm = LLM(model=job["model"], **self.arguments)

    def generate(self, rows: list[dict[str, Any]]) -> list[list[int]]:
        """Ids of each row; the end-of-sequence id is passed over."""
        from vllm import SamplingParams, TokensPrompt

        self.llm.reset_prefix_cache()
        parameters = [SamplingParams(temperature=0.0, max_tokens=row["max_tokens"], ignore_eos=True, detokenize=False)
                      for row in rows]
        prompts = [TokensPrompt(prompt_token_ids=row["prompt_ids"]) for row in rows]
        answers = self.llm.generate(prompts, parameters, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]

    def facts(self) -> dict[str, Any]:
        """Versions and every setting that was given; the libraries by file name."""
        import torch
        import vllm

        shown = {name: value for name, value in self.environment.items() if name.startswith("VLLM_CPU")}
        preload = [Path(name).name for name in self.environment["LD_PRELOAD"].split(":") if name]
        return {"vllm": vllm.__version__, "torch": torch.__version__, **shown, "preload": preload, **self.arguments}

    def close(self) -> None:
        """The process ends with it, and its workers too."""


def load(job: dict[str, Any]) -> Vllm:
    """The engine of this job."""
    return Vllm(job)
