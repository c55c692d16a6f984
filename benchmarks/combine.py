"""What COMBINE gains: experts once over all sub-batches of a step, against experts once for each sub-batch.

    python -m benchmarks.combine [--layers 16] [--hidden 1024] [--experts 16 64] [--chosen 2 6] [--rows 256]
        [--attention-batch 8 16 32 64 128 256] [--kernels auto] [--threads N] [--repeats 3]

The engine decodes `--rows` rows on random mixtures of experts of about 1.5 thousand million parameters (the inner size
follows from the number of experts).  For each size of an attention sub-batch (B_attn) it does so twice: with experts
once for each sub-batch (B_moe = B_attn), and once over all of them (B_moe = rows).  Models, kernels and tokens are the
same; the turns alternate.  Prints, in Markdown, tokens per second of the feed-forward part (norm, router and experts),
and how often an expert ran in a layer of a step: counted, and as many as there are distinct experts in the routes of
the sub-batches.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from batchgen_beam.config.families.qwen import Qwen3MoeConfig
from batchgen_beam.models.experts import Expert, Routing
from batchgen_beam.models.interface import KernelSet, LayerState
from batchgen_beam.models.qwen3_moe import Qwen3MoeModel
from batchgen_beam.settings import KERNELS
from batchgen_beam.transforms.step_times import measure_steps
from batchgen_beam.transforms.timed_engine import timed_kernels
from batchgen_beam.weights.random_model import random_model

__all__ = ["Watch", "distinct", "watch"]

PARAMETERS = 1_500_000_000
UNBOUNDED = 1 << 60
STEPS, PROMPT = 6, 1  # so that every pass has one token of each row


@dataclass
class Watch:
    """What went through the feed-forward parts since it was cleared: seconds, tokens, runs of an expert, and the routes
    of each call, [tokens, chosen]."""

    seconds: float = 0.0
    tokens: int = 0
    runs: int = 0
    routes: list[Tensor] = field(default_factory=list)

    def clear(self) -> None:
        """Begin again."""
        self.seconds, self.tokens, self.runs, self.routes = 0.0, 0, 0, []


class _Counted(list[Expert]):
    """Experts that count how often one is looked up to be run."""

    def __init__(self, experts: Sequence[Expert], seen: Watch) -> None:
        super().__init__(experts)
        self._seen = seen

    def __getitem__(self, index: Any) -> Any:
        self._seen.runs += 1
        return super().__getitem__(index)


def watch(model: Qwen3MoeModel, kernels: KernelSet) -> Watch:
    """Watch every feed-forward part of the model from now on."""
    seen, experts = Watch(), kernels.experts

    def routed(x_TD: Tensor, routing: Routing, *rest: Any, **keys: Any) -> Tensor:
        seen.routes.append(routing.ids_Tk)
        return experts(x_TD, routing, *rest, **keys)

    def timed(feed_forward: Callable[[LayerState], LayerState]) -> Callable[[LayerState], LayerState]:
        def run(state: LayerState) -> LayerState:
            started = time.perf_counter()
            result = feed_forward(state)
            seen.seconds += time.perf_counter() - started
            seen.tokens += len(state.hidden_TD)
            return result
        return run

    cast(Any, kernels).experts = routed
    for layer in model.layers:
        part = cast(Any, layer.expand)
        part.experts = _Counted(part.experts, seen)
        cast(Any, layer).feed_forward = timed(layer.feed_forward)
    return seen


def distinct(routes: Sequence[Tensor], size: int) -> int:
    """Runs of experts when each of these batches is cut into parts of `size` tokens, by the routes alone."""
    return sum(len(part.unique()) for ids_Tk in routes for part in ids_Tk.split(size))


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One measured run: tokens per second of the feed-forward part, and runs of experts in it."""

    speed: float
    runs: int


def _turn(model: Qwen3MoeModel, kernels: KernelSet, seen: Watch, rows: int, attention: int, expert: int) -> Turn:
    seen.clear()
    measure_steps(model, kernels, rows, context=PROMPT + STEPS + 1, steps=STEPS,
                  attention_batch=attention if attention < rows else 0, expert_batch=expert if expert < rows else 0)
    return Turn(speed=seen.tokens / len(model.layers) / seen.seconds, runs=seen.runs)


def _lines(model: Qwen3MoeModel, kernels: KernelSet, given: argparse.Namespace) -> Iterator[str]:
    seen = watch(model, kernels)
    yield "| B_attn | runs apart | runs combined | tokens/s apart | tokens/s combined | gain | least-greatest |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for attention in given.attention_batch:
        apart, combined = [], []
        for _ in range(given.repeats):
            apart.append(_turn(model, kernels, seen, given.rows, attention, attention))
            combined.append(_turn(model, kernels, seen, given.rows, attention, given.rows))
            routes = list(seen.routes)
            for turn, size in ((apart[-1], attention), (combined[-1], given.rows)):
                if turn.runs != distinct(routes, size):
                    raise SystemExit(f"B_attn {attention}: {turn.runs} runs, the routes say {distinct(routes, size)}")
        slow, fast = (statistics.median(turn.speed for turn in turns) for turns in (apart, combined))
        ratios = [two.speed / one.speed for one, two in zip(apart, combined, strict=True)]
        yield (f"| {attention} | {apart[-1].runs:,} | {combined[-1].runs:,} | {slow:,.0f} | {fast:,.0f} | "
               f"{fast / slow:.2f} | {min(ratios):.2f}-{max(ratios):.2f} |")


def _config(given: argparse.Namespace, experts: int, chosen: int) -> Qwen3MoeConfig:
    inner = PARAMETERS // (given.layers * experts * 3 * given.hidden) // 32 * 32
    return Qwen3MoeConfig(
        vocab_size=32_000, hidden_size=given.hidden, intermediate_size=inner, moe_intermediate_size=inner,
        num_hidden_layers=given.layers, num_attention_heads=given.hidden // 64, num_key_value_heads=4, head_dim=64,
        num_experts=experts, num_experts_per_tok=chosen, norm_topk_prob=True, max_position_embeddings=4096)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 16), ("hidden", 1024), ("rows", 256), ("repeats", 3),
                          ("threads", torch.get_num_threads())):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--experts", type=int, nargs="+", default=(16, 64))
    parser.add_argument("--chosen", type=int, nargs="+", default=(2, 6))
    parser.add_argument("--attention-batch", type=int, nargs="+", default=(8, 16, 32, 64, 128, 256))
    parser.add_argument("--kernels", default="auto", choices=KERNELS)
    given = parser.parse_args(arguments)
    for experts in given.experts:
        for chosen in given.chosen:
            config = _config(given, experts, chosen)
            with tempfile.TemporaryDirectory() as folder:
                kernels = timed_kernels(config, kernels=given.kernels, threads=given.threads, cache=Path(folder))
            model = cast(Qwen3MoeModel, random_model(config, kernels, seed=1, room=UNBOUNDED))
            print(f"\n{experts} experts of {config.moe_intermediate_size}, {chosen} for each token; {given.rows} rows; "
                  f"{kernels.facts()['kernels']} kernels, {given.threads} threads; medians of {given.repeats}\n")
            for line in _lines(model, kernels, given):
                print(line, flush=True)


if __name__ == "__main__":
    main()
