"""One engine, once, in a fresh process of its own environment: start it, watch it, end it, read what it wrote."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.race.engines import Engine
from benchmarks.race.environments import python_of, server_of
from benchmarks.race.model_forms import form_of
from benchmarks.race.watch import Sample, sample, tree, usage
from benchmarks.race.workloads import Row, Workload

__all__ = ["Conditions", "Outcome", "run_engine", "wrong_lengths"]

ROOT = Path(__file__).resolve().parents[2]
ADAPTERS = Path(__file__).parent / "adapters"
EVERY = 0.2
"""Seconds between two samples."""
LEAVE = 30.0
"""Seconds that a process has to end after it wrote its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What all engines share.  `limit` is seconds of a whole process; `kv_gib` the memory for keys and values.

    `warm_gib` of memory are touched before each process: a virtual machine gets the pages that it has not used of late
    from its host one by one, which on one machine cost 4 s a GiB, and whichever engine came first paid for it.
    """

    home: Path
    folder: Path
    out: Path
    threads: int
    cores: int
    active_rows: int
    kv_gib: int
    limit: float
    warm_gib: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one process: `ok`, `over LIMIT s`, or why it failed; its figures, and its ids if it is ok."""

    outcome: str
    figures: dict[str, Any]
    ids: list[list[int]] | None = None


def warmup_rows(workload: Workload, active_rows: int) -> list[Row]:
    """Eight short rows for the first-use costs of every engine alike: the workload's token ids in a drawn order.

    So they fit the model, and no prefix cache gains by them.
    """
    draw = random.Random(0)
    pool = [token for row in workload.rows[:8] for token in row.prompt_ids]
    longest = max(len(row.prompt_ids) for row in workload.rows)
    answer = min(8, max(row.max_tokens for row in workload.rows))
    return [Row(uuid=f"warm-up-{i}", prompt_ids=tuple(draw.choices(pool, k=min(16 + 8 * i, longest))),
                max_tokens=answer) for i in range(min(8, active_rows))]


def wrong_lengths(rows: Sequence[Row], ids: Sequence[Sequence[int]]) -> str | None:
    """Why these are not the answers of these rows, each of exactly `max_tokens` ids."""
    if len(ids) != len(rows):
        return f"{len(ids)} answers for {len(rows)} rows"
    wrong = [(row.uuid, len(answer), row.max_tokens) for row, answer in zip(rows, ids, strict=True)
             if len(answer) != row.max_tokens]
    if not wrong:
        return None
    name, found, wanted = wrong[0]
    return f"{len(wrong)} rows have another length than asked for, first {name}: {found}, not {wanted}"


def _job(engine: Engine, workload: Workload, conditions: Conditions, result: Path) -> dict[str, Any]:
    def plain(rows: Sequence[Row]) -> list[dict[str, Any]]:
        return [{"prompt_ids": row.prompt_ids, "max_tokens": row.max_tokens} for row in rows]

    model = conditions.folder
    if engine.model != "folder":
        model = form_of(conditions.home, engine.model, str(engine.settings.get("weights", "bf16")))
    return {"model": str(model.absolute()), "home": str(conditions.home.absolute()), "result": str(result.absolute()),
            "program": str(server_of(conditions.home).absolute()), "threads": conditions.threads,
            "active_rows": conditions.active_rows, "kv_gib": conditions.kv_gib,
            "max_context": -(-(workload.facts()["longest_row"] + 1) // 256) * 256,
            "settings": dict(engine.settings), "warmup": plain(warmup_rows(workload, conditions.active_rows)),
            "rows": plain(workload.rows)}


def _environment(engine: Engine, conditions: Conditions) -> dict[str, str]:
    """The caller's, with the thread count for libraries that read it; our own package from this checkout."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(conditions.threads), "PYTHONWARNINGS": "ignore",
                   "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("PYTHONPATH", None)
    if engine.environment == "project":
        environment["PYTHONPATH"] = str(ROOT)
    return environment


def _python(engine: Engine, conditions: Conditions) -> str:
    """llama.cpp's client needs the standard library only, so it runs in the race's own environment."""
    own = engine.environment in ("project", "llama_cpp")
    return sys.executable if own else str(python_of(conditions.home, engine.environment).absolute())


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the tree."""
    for member in tree(process.pid):
        try:
            os.kill(member, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def _watch(process: subprocess.Popen[bytes], spawned: float, limit: float, result: Path) -> tuple[list[Sample], bool]:
    """Samples until the process ends, and whether it was killed for its time."""
    samples, written = [sample(process.pid)], None
    while process.poll() is None:
        time.sleep(EVERY)
        samples.append(sample(process.pid))
        now = samples[-1].at
        written = written or (now if result.exists() else None)
        if written is None and now - spawned > limit:
            _end(process)
            return samples, True
        if written is not None and now - written > LEAVE:
            _end(process)
    return samples, False


def _figures(samples: Sequence[Sample], spawned: float, moments: dict[str, float], cores: int) -> dict[str, Any]:
    used = usage(samples, moments["started"], moments["ended"], cores)
    return {"seconds": round(moments["ended"] - moments["started"], 3),
            "load_seconds": round(moments["ready"] - spawned, 3),
            "warmup_seconds": round(moments["warm"] - moments["ready"], 3),
            "own_cpu_seconds": round(used.own, 2), "others_cpu_seconds": round(used.others, 2),
            "others_share": round(used.share, 4)}


def warm_memory(gib: int) -> None:
    """Touch so much memory and give it back, in a process of its own."""
    subprocess.run([sys.executable, "-c", f"b'1' * ({gib} << 30)"], check=False)


def run_engine(engine: Engine, workload: Workload, conditions: Conditions, name: str) -> Outcome:
    """Run it once; job, result and log stay in `conditions.out` under `name`."""
    files = {kind: conditions.out / f"{name}.{kind}" for kind in ("job", "result", "log")}
    files["result"].unlink(missing_ok=True)
    files["job"].write_text(json.dumps(_job(engine, workload, conditions, files["result"])))
    command = [_python(engine, conditions), "-P", str(ADAPTERS / "host.py"), str(ADAPTERS / f"{engine.adapter}.py"),
               str(files["job"].absolute())]
    if conditions.warm_gib:
        warm_memory(conditions.warm_gib)
    with files["log"].open("wb") as log:
        spawned = time.monotonic()
        process = subprocess.Popen(command, cwd=conditions.out, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                   env=_environment(engine, conditions))
        try:
            samples, late = _watch(process, spawned, conditions.limit, files["result"])
        finally:
            if process.poll() is None:
                _end(process)
    memory = {"peak_rss_mib": max(one.resident for one in samples) >> 20}
    if late:
        return Outcome(outcome=f"over {conditions.limit:g} s", figures=memory)
    if not files["result"].exists():
        return Outcome(outcome=f"failed with code {process.returncode}, see {files['log'].name}", figures=memory)
    result = json.loads(files["result"].read_text())
    figures = {**_figures(samples, spawned, result["moments"], conditions.cores), **memory, "facts": result["facts"]}
    fault = wrong_lengths(workload.rows, result["ids"])
    return Outcome(outcome="ok" if fault is None else f"failed: {fault}", figures=figures, ids=result["ids"])
