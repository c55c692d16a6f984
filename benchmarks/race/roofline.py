"""The machine's rates: the best product of any library here at the model's own shapes, and the fastest read.

    python -m benchmarks.race.roofline CONFIG.json THREADS

Products are timed with weights in bfloat16 that are new to the caches (copies of the matrix in turn), for 1 to 512 rows
on THREADS threads, with torch (oneDNN) and with each instruction path of this project's kernels; with torch in float32
too, since a processor without bfloat16 may be fastest there.  The rate of a shape is the best of all that; the rate of
the model weighs the shapes by their FLOPs.  Reads are timed as sums over a GiB of floats with 1 to THREADS threads, and
as the weights that one-row products stream; the faster counts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from batchgen_beam.kernels.native_library import PATHS, arithmetic, library
from batchgen_beam.kernels.native_set import NativeKernels
from benchmarks.race.bound import Shapes, shapes_of

__all__ = ["ROWS", "best", "gemm_rates", "measure"]

ROWS = (1, 8, 32, 64, 128, 256, 512)
COPIES_BYTES = 128 << 20
"""Copies of one matrix fill so much: more than the caches hold, about what a small model's weights are."""
READ_BYTES = 1 << 30
LEAST_SECONDS = 0.04
WIDE = "torch float32"
PASSES = 2

Product = Callable[[torch.Tensor, int], torch.Tensor]
"""Of rows with the copy of that number."""


def _seconds(call: Callable[[int], object]) -> float:
    """Of one call, the best of some passes; the argument counts the calls, to take copies in turn."""
    call(0)
    least, number = float("inf"), 0
    for _ in range(PASSES):
        started, calls = time.perf_counter(), 0
        while (passed := time.perf_counter() - started) < LEAST_SECONDS or calls < 2:
            number, calls = number + 1, calls + 1
            call(number)
        least = min(least, passed / calls)
    return least


def _torch_product(copies: Sequence[torch.Tensor]) -> Product:
    return lambda x_TK, number: torch.nn.functional.linear(x_TK, copies[number % len(copies)])


def _wide_product(copies: Sequence[torch.Tensor]) -> Product:
    wide = [weight_NK.float() for weight_NK in copies]
    return lambda x_TK, number: torch.nn.functional.linear(x_TK.float(), wide[number % len(wide)])


def _native_product(path: str, copies: Sequence[torch.Tensor]) -> Product:
    kernels = NativeKernels(torch.bfloat16, path, 1)
    packed = [kernels.pack([weight_NK]) for weight_NK in copies]

    def product(x_TK: torch.Tensor, number: int) -> torch.Tensor:
        kernels.threads = torch.get_num_threads()
        return kernels.linear(x_TK, packed[number % len(packed)])

    return product


def _products(copies: Sequence[torch.Tensor]) -> Iterator[tuple[str, Product]]:
    yield "torch", _torch_product(copies)
    yield WIDE, _wide_product(copies)
    for path in PATHS:
        if library() is not None and arithmetic(path, half=True) is not None:
            yield f"native {path}", _native_product(path, copies)


def gemm_rates(shapes: Shapes, threads: Sequence[int], rows: Sequence[int] = ROWS,
               copies_bytes: int = COPIES_BYTES) -> list[dict[str, Any]]:
    """One record for each library, thread count, product and number of rows, with FLOP/s."""
    generator = torch.Generator().manual_seed(0)
    records: list[dict[str, Any]] = []
    for inputs, outputs, _ in (*shapes.products, (shapes.hidden, shapes.vocabulary, 1)):
        weight_NK = torch.randn(outputs, inputs, generator=generator).to(torch.bfloat16)
        copies = [weight_NK.clone() for _ in range(max(2, copies_bytes // (2 * inputs * outputs)))]
        for name, product in _products(copies):
            for used in threads:
                torch.set_num_threads(used)
                for size in rows:
                    x_TK = torch.randn(size, inputs, generator=generator).to(torch.bfloat16)
                    seconds = _seconds(lambda number, p=product, x=x_TK: p(x, number))  # type: ignore[misc]
                    records.append({"library": name, "threads": used, "rows": size, "inputs": inputs,
                                    "outputs": outputs, "flops": 2 * size * inputs * outputs / seconds})
    return records


def read_rates(threads: Sequence[int]) -> list[dict[str, Any]]:
    """Bytes/s of sums over a GiB of float32."""
    values = torch.ones(READ_BYTES // 4)
    records = []
    for used in threads:
        torch.set_num_threads(used)
        seconds = _seconds(lambda _: values.sum())
        records.append({"library": "torch sum", "threads": used, "bytes_per_second": READ_BYTES / seconds})
    return records


def best(shapes: Shapes, gemm: Sequence[dict[str, Any]], read: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """FLOP/s of the model's products and bytes/s of a read, each by the best of all that was timed."""
    winners, seconds, flops = [], 0.0, 0.0
    for inputs, outputs, count in (*shapes.products, (shapes.hidden, shapes.vocabulary, 1)):
        winner = max((one for one in gemm if (one["inputs"], one["outputs"]) == (inputs, outputs)),
                     key=lambda one: float(one["flops"]))
        winners.append(winner)
        flops += 2 * inputs * outputs * count
        seconds += 2 * inputs * outputs * count / winner["flops"]
    streamed = [{"library": f"{one['library']}, one row", "threads": one["threads"], "bytes_per_second": one["flops"]}
                for one in gemm if one["rows"] == 1 and one["library"] != WIDE]
    fastest = max((*read, *streamed), key=lambda one: float(one["bytes_per_second"]))
    return {"flops": flops / seconds, "read": fastest["bytes_per_second"], "read_by": fastest, "products": winners}


def measure(shapes: Shapes, threads: int) -> dict[str, Any]:
    """All rates of this machine; takes about a minute."""
    gemm, read = gemm_rates(shapes, (threads,)), read_rates(range(1, threads + 1))
    return {"best": best(shapes, gemm, read), "gemm": gemm, "read": read}


def main() -> None:
    """Print the rates as JSON."""
    config, threads = Path(sys.argv[1]), int(sys.argv[2])
    print(json.dumps(measure(shapes_of(json.loads(config.read_text())), threads)))


if __name__ == "__main__":
    main()
