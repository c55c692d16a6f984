"""A model larger than its memory: this engine against transformers with accelerate's disk offload.

    python -m benchmarks.offload make --model FOLDER [--experts 16] [--chosen 2]
    python -m benchmarks.offload run --model FOLDER --cache FOLDER --home FOLDER --out FILE.json
        [--limits 8 20] [--weight-memory 1] [--batches 1 8 32 128 256] [--job-rows 4096] [--rows 1024 ...]
        [--peer-dtypes bfloat16 float32]
    python -m benchmarks.offload summary --out FILE.json

`make` writes a random mixture of experts of about 1.5 thousand million parameters as a checkpoint.  `run` gives both
engines the same `--weight-memory` and, in a control group that counts page cache too, the same memory in all
(`--limits`, GB); where no group can be made, it says so and keeps dropping the files from the page cache.  Prompts of
64 tokens, answers of 16, greedy; loading, and for ours the one conversion, is told apart.  Per limit ours runs the
batch that the planner names for a job of `--job-rows` (`--rows`: so many rows), and for the share that is due to the
batch each of `--batches`, as the peer does; turns alternate.  The peer may run in float32 too, which a processor
without bfloat16 multiplies much faster.  The disk's rate is that of direct reads of the packed copy, measured
before and after.  The last lines, which `summary` prints again, compare at each limit ours at its own batch with the
peer's best, both at that batch, and our decode step with the time that its bytes take at the disk's rate.  Needs the
environment that `python -m benchmarks.offload setup --home FOLDER` makes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from batchgen_beam.config.model_registry import load_config
from batchgen_beam.config.model_sizes import model_sizes
from batchgen_beam.config.sizes import WeightForm
from batchgen_beam.engine.measured_costs import MeasuredCosts
from batchgen_beam.engine.model_load import ModelLoad
from batchgen_beam.engine.planner import BatchPlan
from batchgen_beam.engine.run_plan import plan_run
from batchgen_beam.engine.tiers import Budgets, Workload
from batchgen_beam.kernels.packing import packing_of
from batchgen_beam.records import Failure, Prompt, RowKey, SamplingParams, token_array
from batchgen_beam.settings import EngineSettings
from batchgen_beam.transforms.machine_times import head_dtype, machine_times, run_needs
from batchgen_beam.transforms.timed_engine import timed_engine, timed_kernels
from batchgen_beam.weights.disk_rate import PIECE_BYTES, read_seconds
from batchgen_beam.weights.tiered_loader import load_tiered
from benchmarks.memory_limit import MemoryGroup, memory_group
from benchmarks.race.environments import make_environment, python_of

ENVIRONMENT = "accelerate"
GB = 10**9
PROMPT, OUTPUT = 64, 16
PROCESS = GB
"""Of a limit: the interpreter, libraries and what else a process holds beside weights, keys, values and a pass."""

LAYERS, HIDDEN, VOCABULARY = 16, 1024, 32_000
PARAMETERS = 1_500_000_000
DISK_SAMPLE = 2 << 30
DROP_SECONDS = 0.25


def make(folder: Path, experts: int, chosen: int) -> None:
    """One shard for each layer, and one for what stands around them."""
    inner = PARAMETERS // (LAYERS * experts * 3 * HIDDEN) // 32 * 32
    heads, kv_heads, size = HIDDEN // 64, HIDDEN // 128, 64
    folder.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(7)
    index: dict[str, str] = {}

    def save(file: str, shapes: dict[str, tuple[int, ...]]) -> None:
        tensors = {name: torch.ones(shape, dtype=torch.bfloat16) if len(shape) == 1 else
                   torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=random)
                   for name, shape in shapes.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file))

    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes: dict[str, tuple[int, ...]] = {
            f"{at}input_layernorm.weight": (HIDDEN,), f"{at}post_attention_layernorm.weight": (HIDDEN,),
            f"{at}self_attn.q_proj.weight": (heads * size, HIDDEN),
            f"{at}self_attn.o_proj.weight": (HIDDEN, heads * size),
            f"{at}self_attn.k_proj.weight": (kv_heads * size, HIDDEN),
            f"{at}self_attn.v_proj.weight": (kv_heads * size, HIDDEN),
            f"{at}block_sparse_moe.gate.weight": (experts, HIDDEN)}
        for e in range(experts):
            one = f"{at}block_sparse_moe.experts.{e}."
            shapes |= {f"{one}w1.weight": (inner, HIDDEN), f"{one}w3.weight": (inner, HIDDEN),
                       f"{one}w2.weight": (HIDDEN, inner)}
        save(f"model-{layer:05}.safetensors", shapes)
    save("model-rest.safetensors", {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,),
                                    "lm_head.weight": (VOCABULARY, HIDDEN)})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN, "intermediate_size": inner, "num_hidden_layers": LAYERS, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": size, "num_local_experts": experts, "num_experts_per_tok": chosen,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None,
        "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 1,
        "eos_token_id": 2}))


# --- our side, in a process of its own -------------------------------------------------------------------------------


def ours(given: argparse.Namespace) -> None:
    """Load, answer, print one JSON object."""
    started = time.perf_counter()
    kernels = timed_kernels(load_config(str(given.model)), kernels="auto", threads=given.threads, cache=given.cache)
    tiered = load_tiered(given.model, kernels, packing_of(kernels), limit=given.weight_memory, cache=given.cache)
    settings = EngineSettings(max_rows=given.rows, kv_memory=given.kv_memory, max_context=PROMPT + OUTPUT,
                              step_tokens=given.step_tokens, attention_batch=given.attention_batch,
                              threads=given.threads)
    engine = timed_engine(tiered.model, kernels, settings)
    loaded = time.perf_counter()
    before = tiered.streamed()
    ids = torch.randint(3, tiered.model.vocab_size, (given.rows, PROMPT), generator=torch.Generator().manual_seed(5))
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT)
    for row, line in enumerate(ids.tolist()):
        engine.submit(Prompt(key=RowKey(f"{row}", "offload"), token_ids=token_array(line), params=params))
    steps, going = [], True
    while going:
        begun = time.perf_counter()
        going = engine.step()
        steps.append(time.perf_counter() - begun)
        for answer in engine.poll():
            if isinstance(answer, Failure):
                raise SystemExit(f"row {answer.key.uuid} failed: {answer.code}: {answer.message}")
    seconds = time.perf_counter() - loaded
    after, stats = tiered.streamed(), engine.stats()
    assert stats.rows_done == given.rows
    print(json.dumps({
        "load_seconds": loaded - started, "seconds": seconds, "steps": stats.steps,
        "decode_step": statistics.median(steps[-OUTPUT:-1]), "streamed_bytes": tiered.residency.streamed_bytes,
        "weight_bytes": tiered.residency.total_bytes,
        "read_bytes": after.read_bytes - before.read_bytes if after and before else 0,
        "waited_seconds": after.waited_seconds - before.waited_seconds if after and before else 0.0,
        "evictions": stats.evictions, "peak_rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        **kernels.facts()}))


# --- our batch -------------------------------------------------------------------------------------------------------


def planned(model: Path, cache: Path, *, threads: int, weight_memory: int, limit: int, job_rows: int) -> BatchPlan:
    """What the planner names for a job of so many rows of this benchmark under a limit of memory in all."""
    config = load_config(str(model))
    kernels = timed_kernels(config, kernels="auto", threads=threads, cache=cache)
    load = ModelLoad.of(model_sizes(config), WeightForm(dtype="bfloat16", head=head_dtype(kernels)), "auto")
    costs = MeasuredCosts(load, machine_times(config, load, kernels, cache))
    return plan_run(load, run_needs(config, kernels), costs,
                    Budgets(device=limit - PROCESS, weights=weight_memory, unified=True),
                    Workload(rows=job_rows, prompt_tokens=PROMPT, output_tokens=OUTPUT))


def batch_flags(plan: BatchPlan) -> list[str]:
    """The plan for a process of ours."""
    b_attn = plan.choice.b_attn
    return ["--rows", str(plan.rows), "--step-tokens", str(max(plan.rows, plan.choice.b_moe)),
            "--attention-batch", str(b_attn if b_attn < plan.rows else 0)]


# --- the comparison --------------------------------------------------------------------------------------------------


def read_rate(folder: Path) -> float:
    """Bytes per second of direct reads of the largest files, one after the other."""
    done, seconds = 0, 0.0
    for path in sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: -path.stat().st_size):
        size = min(DISK_SAMPLE - done, path.stat().st_size // PIECE_BYTES * PIECE_BYTES)
        seconds += read_seconds(path, size)
        done += size
        if done == DISK_SAMPLE:
            return done / seconds
    raise SystemExit(f"{folder} holds less than {DISK_SAMPLE:,} bytes to read")


def _drop(folders: Sequence[Path]) -> None:
    """Take all files in the folders out of the page cache."""
    for path in (path for folder in folders for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _keep_out(folders: Sequence[Path], over: threading.Event) -> None:
    """The same until `over`."""
    while not over.wait(DROP_SECONDS):
        _drop(folders)


def run_limited(command: Sequence[str | Path], limit: int, folders: Sequence[Path]) -> dict[str, Any]:
    """The command's JSON, with the group's peak; or how it ended."""
    with memory_group(limit) as group:
        over = threading.Event()
        _drop(folders)  # both begin with nothing of them in memory
        dropper = threading.Thread(target=_keep_out, args=(folders, over), daemon=True)
        if group is None:
            dropper.start()
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False,
                              preexec_fn=None if group is None else group.enter)
        over.set()
        enforced: dict[str, Any] = {"enforced": group is not None, "group_peak": _peak(group)}
    if done.returncode:
        return {"ended": done.returncode, "error": done.stderr.strip().splitlines()[-1:], **enforced}
    return {**json.loads(done.stdout.strip().splitlines()[-1]), **enforced}


def _peak(group: MemoryGroup | None) -> int | None:
    return None if group is None else group.peak()


def compare(given: argparse.Namespace) -> None:
    """All limits and batches, into one JSON file as they come."""
    weight_memory = int(given.weight_memory * GB)
    common = ["--weight-memory", str(weight_memory), "--threads", str(given.threads)]
    our_command = [sys.executable, "-m", "benchmarks.offload", "ours", "--model", given.model, "--cache", given.cache,
                   *common]
    peer_command = [python_of(given.home, ENVIRONMENT), Path(__file__).with_name("offload_peer.py"), "--model",
                    given.model, *common, "--prompt", str(PROMPT), "--output", str(OUTPUT)]
    offloaded = {dtype: given.home / f"offloaded-{dtype}" for dtype in given.peer_dtypes}
    peers = {"accelerate" if dtype == "bfloat16" else f"accelerate {dtype}":
             [*peer_command, "--dtype", dtype, "--offload", folder] for dtype, folder in offloaded.items()}
    folders = (given.model, given.cache, *offloaded.values())
    own = _own_batches(given, weight_memory)
    first = run_limited([*our_command, "--rows", "1"], given.limits[0] * GB, folders)
    results: list[dict[str, Any]] = []
    report = {"prompt": PROMPT, "output": OUTPUT, "weight_memory": weight_memory, "threads": given.threads,
              "conversion_and_first_run": first, "disk_rates": [read_rate(given.cache)], "runs": results,
              "own_batches": {str(limit): flags for limit, flags in zip(given.limits, own, strict=True)}}

    def one(engine: str, command: Sequence[str | Path], batch: Sequence[str], limit: int) -> None:
        found, rows = run_limited([*command, *batch], limit * GB, folders), int(batch[1])
        speed = rows * OUTPUT / found["seconds"] if "seconds" in found else None
        results.append({"engine": engine, "limit_gb": limit, "rows": rows, "tokens_per_second": speed, **found})
        said = "did not finish" if speed is None else f"{speed:.2f} tokens/s"
        print(f"{engine} {limit} GB {rows} rows: {said} {json.dumps(found)}", flush=True)
        given.out.write_text(json.dumps(report, indent=1))

    for limit, batch in zip(given.limits, own, strict=True):
        one("ours", our_command, batch, limit)
        for rows in given.batches:
            for peer, command in peers.items():
                one(peer, command, ["--rows", str(rows)], limit)
            one("ours", our_command, ["--rows", str(rows)], limit)
        one("ours", our_command, batch, limit)
    report["disk_rates"] = [*report["disk_rates"], read_rate(given.cache)]
    given.out.write_text(json.dumps(report, indent=1))
    print("\n".join(summary(report)))


def _own_batches(given: argparse.Namespace, weight_memory: int) -> list[list[str]]:
    """Flags of ours at each limit: `--rows` where it is given, else the planner's."""
    if given.rows is not None:
        return [["--rows", str(rows)] for _, rows in zip(given.limits, given.rows, strict=True)]
    plans = [planned(given.model, given.cache, threads=given.threads, weight_memory=weight_memory, limit=limit * GB,
                     job_rows=given.job_rows) for limit in given.limits]
    return [batch_flags(plan) for plan in plans]


def summary(report: Mapping[str, Any]) -> Iterator[str]:
    """Lines of Markdown, one for each limit: medians where a batch ran twice, a dash where one did not finish.

    `batch` is what ours gains from its own batch over the peer's best one; with `same batch` it makes `ratio`.
    """
    rate = statistics.mean(report["disk_rates"])
    yield f"disk: {', '.join(f'{one / 1e9:.2f}' for one in report['disk_rates'])} GB/s by direct reads"
    yield ("| limit | own batch | tokens/s | peer's best batch | tokens/s | ratio | same batch | batch | decode step s "
           "| bytes of a step | disk bound s | of the bound |")
    yield "|" + " --- |" * 12
    for limit, flags in report["own_batches"].items():
        runs = [run for run in report["runs"] if str(run["limit_gb"]) == limit]
        speeds = _speeds(runs)
        rows, peers = int(flags[1]), dict[int, float]()
        for (engine, batch), speed in speeds.items():
            if engine != "ours":
                peers[batch] = max(speed, peers.get(batch, 0.0))
        own = [run for run in runs if (run["engine"], run["rows"]) == ("ours", rows) and "decode_step" in run]
        if not peers or not own:
            yield f"| {limit} GB | {rows:,} |" + " - |" * 10
            continue
        best = max(peers, key=lambda batch: peers[batch])
        mine, same = speeds["ours", rows], speeds.get(("ours", best))
        step = statistics.median(run["decode_step"] for run in own)
        size, bound = own[0]["streamed_bytes"], own[0]["streamed_bytes"] / rate
        parts = "- | -" if same is None else f"{same / peers[best]:.2f} | {mine / same:.2f}"
        yield (f"| {limit} GB | {rows:,} | {mine:.1f} | {best:,} | {peers[best]:.1f} | {mine / peers[best]:.2f} | "
               f"{parts} | {step:.3f} | {size:,} | {bound:.3f} | {bound / step:.2f} |")


def _speeds(runs: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], float]:
    """Median tokens/s by engine and batch, of those that finished."""
    found: dict[tuple[str, int], list[float]] = {}
    for run in runs:
        if run["tokens_per_second"] is not None:
            found.setdefault((run["engine"], run["rows"]), []).append(run["tokens_per_second"])
    return {key: statistics.median(speeds) for key, speeds in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Make, set up or run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("--model", type=Path, required=True)
    making.add_argument("--experts", type=int, default=16)
    making.add_argument("--chosen", type=int, default=2)
    commands.add_parser("setup").add_argument("--home", type=Path, required=True)
    commands.add_parser("summary").add_argument("--out", type=Path, required=True)
    running, child = commands.add_parser("run"), commands.add_parser("ours")
    for one in (running, child):
        one.add_argument("--model", type=Path, required=True)
        one.add_argument("--cache", type=Path, required=True)
        one.add_argument("--threads", type=int, default=torch.get_num_threads())
    running.add_argument("--home", type=Path, required=True)
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--weight-memory", type=float, default=1.0, help="GB")
    running.add_argument("--limits", type=int, nargs="+", default=[8, 20], help="GB")
    running.add_argument("--job-rows", type=int, default=4096, help="among which the planner chooses how many at once")
    running.add_argument("--peer-dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16"])
    running.add_argument("--rows", type=int, nargs="+", help="of ours, for each limit; default: as the planner says")
    running.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128, 256])
    child.add_argument("--weight-memory", type=int, required=True)
    child.add_argument("--rows", type=int, required=True)
    child.add_argument("--kv-memory", type=int, default=12 * GB)
    child.add_argument("--step-tokens", type=int, default=4096)
    child.add_argument("--attention-batch", type=int, default=0)
    given = parser.parse_args(arguments)
    match given.command:
        case "make":
            make(given.model, given.experts, given.chosen)
        case "setup":
            make_environment(given.home, ENVIRONMENT)
        case "summary":
            print("\n".join(summary(json.loads(given.out.read_text()))))
        case "ours":
            ours(given)
        case _:
            compare(given)


if __name__ == "__main__":
    main()
