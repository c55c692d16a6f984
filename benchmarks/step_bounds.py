"""Where the time of a decode step goes, and how near each part comes to what the machine can do.

    python -m benchmarks.step_bounds --model MODEL [--rows 1 8 32 64 128 256] [--context 128] [--threads N] [--out FILE]

Measures the machine's rates (see `benchmarks.race.roofline`), then steps of the real engine, in one process.  The bound
of a part is max(FLOPs / GEMM rate, bytes / read rate), where a product reads its weights once a step and attention the
keys and values of all rows.  Norms, rope and appending work on what is in the caches and have none; neither has what
the engine does beside the model.  Prints a table in Markdown: milliseconds, and the bound's share of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchgen_beam.config.model_registry import load_config
from batchgen_beam.settings import KERNELS
from batchgen_beam.transforms.model_store import resolve_model
from batchgen_beam.transforms.resources import available_cores
from batchgen_beam.transforms.step_times import STEPS, StepTime, measure_steps
from batchgen_beam.transforms.timed_engine import timed_kernels
from batchgen_beam.weights.loader import load_model
from benchmarks.race.bound import WEIGHT_BYTES, Shapes, shapes_of
from benchmarks.race.roofline import measure

__all__ = ["part_bounds", "table"]

ROWS = (1, 8, 32, 64, 128, 256)


def part_bounds(shapes: Shapes, rows: int, context: float, flops: float, read: float) -> dict[str, float]:
    """Least seconds of each part of one decode step of `rows` rows, whose contexts have so many tokens in the mean.

    `flops` and `read` are the machine's rates, in FLOP/s and bytes/s.
    """
    names = ("qkv", "out", "gate_up", "down", "head")
    weights = [inputs * outputs * count for inputs, outputs, count in shapes.products] + [shapes.head]
    bounds = {name: max(2 * rows * count / flops, WEIGHT_BYTES * count / read)
              for name, count in zip(names, weights, strict=True)}
    pairs = rows * context * shapes.layers * shapes.head_size
    bounds["attention"] = max(4 * pairs * shapes.heads / flops, 2 * pairs * shapes.kv_heads * WEIGHT_BYTES / read)
    return bounds


def table(shapes: Shapes, times: Sequence[StepTime], context: float, rates: Mapping[str, Any]) -> Iterator[str]:
    """Lines of Markdown: a row for each part, a column for each number of rows."""
    bounds = [part_bounds(shapes, one.rows, context, rates["flops"], rates["read"]) for one in times]
    yield "| part | " + " | ".join(f"{one.rows} rows" for one in times) + " |"
    yield "| --- " * (len(times) + 1) + "|"
    for part in times[0].parts:
        yield f"| {part} | " + " | ".join(
            _cell(one.parts[part], bound.get(part)) for one, bound in zip(times, bounds, strict=True)) + " |"
    yield "| step | " + " | ".join(
        _cell(one.median, sum(bound.values())) for one, bound in zip(times, bounds, strict=True)) + " |"


def _cell(seconds: float, bound: float | None) -> str:
    share = "" if bound is None or not seconds else f" ({bound / seconds:.2f})"
    return f"{1e3 * seconds:.2f}{share}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a checkpoint folder or a GGUF file")
    parser.add_argument("--model-cache", type=Path, default=Path(".cache/models"))
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--context", type=int, default=128, help="tokens of each row at the end")
    parser.add_argument("--kernels", default="auto", choices=KERNELS)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--out", type=Path, help="a JSON file with the figures")
    args = parser.parse_args(arguments)
    folder = resolve_model(args.model, args.model_cache)
    shapes = shapes_of(json.loads((folder / "config.json").read_text()))
    rates = measure(shapes, args.threads)["best"]
    kernels = timed_kernels(load_config(str(folder)), kernels=args.kernels, threads=args.threads,
                            cache=args.model_cache)
    model = load_model(folder, kernels)
    times = [measure_steps(model, kernels, rows, context=args.context) for rows in args.rows]
    context = args.context - STEPS / 2
    print(f"{args.threads} threads, {kernels.facts().get('path', kernels.name)}, contexts of {context:g} tokens; "
          f"{rates['flops'] / 1e9:.0f} GFLOP/s, {rates['read'] / 1e9:.1f} GB/s\n")
    print("\n".join(table(shapes, times, context, rates)))
    if args.out is not None:
        figures = [{"rows": one.rows, "seconds": one.median, "least": one.least, "greatest": one.greatest,
                    "parts": dict(one.parts),
                    "bounds": part_bounds(shapes, one.rows, context, rates["flops"], rates["read"])} for one in times]
        args.out.write_text(json.dumps({"rates": rates, "context": context, "steps": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
