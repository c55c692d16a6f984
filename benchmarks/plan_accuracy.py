"""How near the planner's step times come to measured ones, on a random mixture of experts.

    python -m benchmarks.plan_accuracy [--layers 16] [--hidden 1024] [--inner 1792] [--experts 16] [--chosen 2]
        [--rows 8 32 128] [--attention-batch 0 32] [--context 128] [--kernels auto] [--threads N] [--repeats 3]

Times each kind of layer as `batchgen-beam plan` does, afresh, and predicts steps from that; then builds the whole model
and lets the real engine decode.  Takes `--repeats` turns of timing and measuring, and compares medians.  Prints a table
in Markdown: seconds of a step, predicted and measured, and by how much the prediction is off.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from batchgen_beam.config.families.mistral import MixtralConfig
from batchgen_beam.config.model_sizes import model_sizes
from batchgen_beam.config.sizes import WeightForm
from batchgen_beam.engine.measured_costs import MeasuredCosts
from batchgen_beam.engine.model_load import ModelLoad
from batchgen_beam.engine.planner import evaluate
from batchgen_beam.engine.tiers import Budgets, Choice, Placement, Workload, place
from batchgen_beam.models.interface import KernelSet, Model
from batchgen_beam.settings import KERNELS
from batchgen_beam.transforms.machine_times import machine_times
from batchgen_beam.transforms.step_times import STEPS, measure_steps
from batchgen_beam.transforms.timed_engine import timed_kernels
from batchgen_beam.weights.random_model import random_model

__all__ = ["predicted_step", "table"]

UNBOUNDED = 1 << 60
VOCABULARY = 32_000

Case = tuple[int, int]
"""Rows, and the rows of an attention sub-batch, 0: all."""


def predicted_step(load: ModelLoad, costs: MeasuredCosts, case: Case, context: int) -> float:
    """Seconds of a step of rows that end at `context` tokens, all weights in memory."""
    rows, attention = case
    work = Workload(rows=rows, prompt_tokens=context - STEPS, output_tokens=STEPS)
    choice = Choice(b_attn=attention or rows, b_moe=rows, chunks=1, buffers=2)
    placement = place(load, Budgets(device=UNBOUNDED, unified=True), work, choice)
    assert isinstance(placement, Placement)
    return evaluate(load, costs, work, choice, placement).step


def table(predicted: Sequence[tuple[Case, float]], measured: Sequence[float]) -> Iterator[str]:
    """Lines of Markdown, one for each case."""
    yield "| rows | attention rows | predicted s | measured s | off by |"
    yield "| --- | --- | --- | --- | --- |"
    for ((rows, attention), guess), seconds in zip(predicted, measured, strict=True):
        yield f"| {rows} | {attention or rows} | {guess:.4f} | {seconds:.4f} | {100 * (guess / seconds - 1):+.0f} % |"


def _config(given: argparse.Namespace) -> MixtralConfig:
    return MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=given.hidden, intermediate_size=given.inner, num_hidden_layers=given.layers,
        num_attention_heads=given.hidden // 64, num_key_value_heads=max(1, given.hidden // 128), head_dim=64,
        num_local_experts=given.experts, num_experts_per_tok=given.chosen, sliding_window=None,
        max_position_embeddings=4096)


def _predict(config: MixtralConfig, load: ModelLoad, kernels: KernelSet, cases: Sequence[Case],
             context: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        costs = MeasuredCosts(load, machine_times(config, load, kernels, Path(folder)))
    return [predicted_step(load, costs, case, context) for case in cases]


def _measure(model: Model, kernels: KernelSet, cases: Sequence[Case], context: int) -> list[float]:
    return [measure_steps(model, kernels, rows, context=context, attention_batch=attention).median
            for rows, attention in cases]


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 16), ("hidden", 1024), ("inner", 1792), ("experts", 16), ("chosen", 2),
                          ("context", 128), ("repeats", 3), ("threads", torch.get_num_threads())):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", type=int, nargs="+", default=(8, 32, 128))
    parser.add_argument("--attention-batch", type=int, nargs="+", default=(0, 32))
    parser.add_argument("--kernels", default="auto", choices=KERNELS)
    given = parser.parse_args(arguments)
    config = _config(given)
    load = ModelLoad.of(model_sizes(config), WeightForm(dtype="bfloat16"), "auto")
    with tempfile.TemporaryDirectory() as folder:
        kernels = timed_kernels(config, kernels=given.kernels, threads=given.threads, cache=Path(folder))
    cases = [(rows, batch) for rows in given.rows for batch in given.attention_batch if batch < rows]
    model = random_model(config, kernels, seed=1, room=UNBOUNDED)
    guesses, times = [], []
    for _ in range(given.repeats):
        guesses.append(_predict(config, load, kernels, cases, given.context))
        times.append(_measure(model, kernels, cases, given.context))
    print(f"{load.weight_bytes:,} bytes of weights, {kernels.facts()['kernels']} kernels, {given.threads} threads; "
          f"rows end at {given.context} tokens; medians of {given.repeats}\n")
    predicted = [statistics.median(one) for one in zip(*guesses, strict=True)]
    measured = [statistics.median(one) for one in zip(*times, strict=True)]
    print("\n".join(table(list(zip(cases, predicted, strict=True)), measured)))


if __name__ == "__main__":
    main()
