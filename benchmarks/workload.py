"""Batch completion time of one workload, with the time split by part.

A workload is a JSONL file: one row with `uuid`, `prompt_ids` and `max_tokens` per line.  End-of-sequence ids are
ignored, so that every row has its exact length, as in the comparisons with other engines.

    python -m benchmarks.workload --model MODEL --workload FILE [--rows N] [--kernels auto] [--out FILE.json]

MODEL is a checkpoint folder or a GGUF file.  Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from batchgen_beam.config.model_registry import load_config
from batchgen_beam.engine.engine import Engine
from batchgen_beam.models.dense import DenseDecoder
from batchgen_beam.models.interface import Forward
from batchgen_beam.records import Answer, Failure, Outcome, Prompt, RowKey, SamplingParams, token_array
from batchgen_beam.settings import KERNELS, KV_DTYPES, EngineSettings
from batchgen_beam.transforms.model_store import resolve_model
from batchgen_beam.transforms.resources import available_cores
from batchgen_beam.transforms.timed_engine import timed_engine, timed_kernels
from batchgen_beam.weights.loader import load_model
from benchmarks.race.workloads import read

PARTS = ("linear", "attention", "append", "head", "rms_norm", "rope", "swiglu", "embed")


class OperationClock:
    """Wall time of a kernel set's operations, or of the whole forward pass where the set fuses it."""

    def __init__(self, kernels: Any) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        for part in PARTS:
            setattr(kernels, part, self._timed(part, getattr(kernels, part)))
        fuse = kernels.fuse

        def timed_fuse(decoder: DenseDecoder) -> Forward | None:
            fused = fuse(decoder)
            return None if fused is None else self._timed("forward", fused)

        kernels.fuse = timed_fuse

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **keys: Any) -> Any:
            started = time.perf_counter()
            result = call(*args, **keys)
            self.seconds[part] += time.perf_counter() - started
            return result

        return timed


def read_prompts(path: Path, rows: int | None, temperature: float, top_p: float) -> list[Prompt]:
    """The first `rows` rows, with their exact output lengths; sampled rows have seed 0."""
    return [Prompt(key=RowKey(row.uuid, "workload"), token_ids=token_array(row.prompt_ids),
                   params=SamplingParams(temperature=temperature, top_p=top_p, seed=0, max_tokens=row.max_tokens))
            for row in read(path).rows[:rows]]


def outcomes(answers: Sequence[Answer]) -> list[Outcome]:
    """The answers, all of which are outcomes: a time without some of the rows is no time of the workload."""
    found = [answer for answer in answers if isinstance(answer, Outcome)]
    for answer in answers:
        if isinstance(answer, Failure):
            raise SystemExit(f"row {answer.key.uuid} failed: {answer.code}: {answer.message}")
    return found


def measure(engine: Engine, clock: OperationClock, prompts: list[Prompt]) -> dict[str, Any]:
    """Run to the last row; seconds are wall time from the first submission.  A row that fails ends the benchmark."""
    cpu, started = time.process_time(), time.perf_counter()
    for prompt in prompts:
        engine.submit(prompt)
    queued = engine.stats()
    while engine.step():
        outcomes(engine.poll())
        queued = engine.stats() if engine.stats().queued else queued
    outcomes(engine.poll())
    seconds = time.perf_counter() - started
    stats = engine.stats()
    parts = {part: round(value, 2) for part, value in sorted(clock.seconds.items(), key=lambda item: -item[1])}
    return {
        "seconds": round(seconds, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "rows": stats.rows_done,
        "prompt_tokens": stats.prompt_tokens,
        "output_tokens": stats.generated_tokens,
        "output_tokens_per_second": round(stats.generated_tokens / seconds, 1),
        "total_tokens_per_second": round((stats.generated_tokens + stats.prompt_tokens) / seconds, 1),
        "steps": stats.steps,
        "fill": round(stats.fill, 3),
        "fill_while_rows_waited": round(queued.fill, 3),
        "cached_tokens": stats.cached_tokens,
        "recomputed_tokens": stats.recomputed_tokens,
        "evictions": stats.evictions,
        "seconds_by_part": {**parts, "sampler, scheduler, packing": round(seconds - sum(clock.seconds.values()), 2)},
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    """Load, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", required=True, type=Path)
    parser.add_argument("--model-cache", type=Path, default=Path(".cache/models"))
    parser.add_argument("--rows", type=int, help="only the first N rows")
    parser.add_argument("--max-rows", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--kv-dtype", default="auto", choices=KV_DTYPES)
    parser.add_argument("--kernels", default="auto", choices=KERNELS)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--order", default="longest", choices=("longest", "arrival"), help="rows that enter first")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    started = time.perf_counter()
    folder = resolve_model(args.model, args.model_cache)
    kernels = timed_kernels(load_config(str(folder)), dtype=args.dtype, kv_dtype=args.kv_dtype, kernels=args.kernels,
                            threads=args.threads, cache=args.model_cache)
    clock = OperationClock(kernels)
    model = load_model(folder, kernels)
    load_seconds = time.perf_counter() - started
    settings = EngineSettings(dtype=args.dtype, kv_dtype=args.kv_dtype, max_rows=args.max_rows, kv_memory=2 << 30,
                              max_context=2048, longest_first=args.order == "longest")
    prompts = read_prompts(args.workload, args.rows, args.temperature, args.top_p)
    report = {"workload": args.workload.name, "load_seconds": round(load_seconds, 2), **kernels.facts(),
              **measure(timed_engine(model, kernels, settings), clock, prompts),
              "seconds_of_the_pass": {part: round(value, 2) for part, value in kernels.seconds().items()}}
    text = json.dumps(report, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
