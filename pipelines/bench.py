"""`batchgen-beam bench`: how fast a model runs on this machine, by rows at once, and where the time goes.

Owns the flags and the table.  Does not know how a step is timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TextIO

from batchgen_beam.config.model_registry import load_config
from batchgen_beam.errors import OptionError
from batchgen_beam.kernels.packing import packing_of
from batchgen_beam.models.interface import KernelSet, Model
from batchgen_beam.pipelines.options import StrictParser, add_options
from batchgen_beam.transforms.model_store import resolve_model
from batchgen_beam.transforms.resources import available_cores
from batchgen_beam.transforms.step_times import StepTime, measure_prompts, measure_steps
from batchgen_beam.transforms.timed_engine import timed_kernels
from batchgen_beam.weights.loader import load_model
from batchgen_beam.weights.tiered_loader import load_tiered

__all__ = ["bench_model"]

ROWS = (1, 8, 32, 64, 128, 256)
CONTEXT = 128


def bench_model(flags: Sequence[str], stream: TextIO) -> None:
    """Load a model, write how fast it runs."""
    parser = StrictParser(prog="batchgen-beam bench", description="How fast a model runs on this machine.",
                          allow_abbrev=False)
    parser.add_argument("model", help="a model folder, a GGUF file, or a URI of either")
    parser.add_argument("--rows", metavar="N,N", default=",".join(map(str, ROWS)), help="rows that decode at once")
    parser.add_argument("--context", type=int, metavar="N", default=CONTEXT, help="tokens of each row at the end")
    add_options(parser, "--model-cache", "--dtype", "--kv-dtype", "--kernels", "--threads", "--weight-memory")
    given = parser.parse_args(list(flags))
    rows = _counts(given.rows)
    threads = given.threads or available_cores()
    cache = Path(given.model_cache)
    folder = resolve_model(given.model, cache)
    kernels = timed_kernels(load_config(str(folder)), dtype=given.dtype, kv_dtype=given.kv_dtype,
                            kernels=given.kernels, threads=threads, cache=cache)
    model = _load(folder, kernels, given.weight_memory, cache)
    facts = kernels.facts()
    names = " ".join(str(facts[name]) for name in ("kernels", "path") if name in facts)
    kept = f", KV {facts['kv_dtype']}" if "kv_dtype" in facts else ""
    stream.write(f"{given.dtype}{kept}, {names} kernels, {threads} threads; rows end at {given.context} tokens\n\n")
    for line in _table(measure_steps(model, kernels, count, context=given.context) for count in rows):
        stream.write(line + "\n")
        stream.flush()
    stream.write(f"\nprompts: {measure_prompts(model, kernels):,.0f} tokens/s\n")


def _load(folder: Path, kernels: KernelSet, weight_memory: int, cache: Path) -> Model:
    """As a run does."""
    if not weight_memory:
        return load_model(folder, kernels)
    return load_tiered(folder, kernels, packing_of(kernels), limit=weight_memory, cache=cache).model


def _counts(text: str) -> list[int]:
    counts = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if not all(counts):
        raise OptionError(f"--rows takes numbers of rows from 1 on, comma-separated, not {text!r}")
    return counts


def _table(times: Iterable[StepTime]) -> Iterator[str]:
    """A header and one line for each number of rows; milliseconds."""
    header = ""
    for step in times:
        if not header:
            header = f"{'rows':>5}{'ms/step':>9}{'tokens/s':>10}" + "".join(f"{part:>10}" for part in step.parts)
            yield header
        parts = "".join(f"{1e3 * seconds:>10.2f}" for seconds in step.parts.values())
        yield f"{step.rows:>5}{1e3 * step.median:>9.1f}{step.rows / step.median:>10,.0f}{parts}"
