"""What `batchgen-beam plan` says of a plan: memory, batches, the reason, time and cost.

Owns the lines.  Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

from batchgen_beam.config.sizes import ModelSizes
from batchgen_beam.engine.layer_graph import Resource
from batchgen_beam.engine.planner import BatchPlan
from batchgen_beam.engine.tiers import Budgets, Tier, Workload

__all__ = ["Planned", "report"]

_WIDTH = 14


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan and what it was made for.  `where`: lines about the machine; `kept`: how weights are kept, which then take
    `weight_bytes`.

    `flags`: what of the plan's own flags `run` needs too.
    """

    model_type: str
    sizes: ModelSizes
    work: Workload
    budgets: Budgets
    plan: BatchPlan
    weight_bytes: int
    where: tuple[tuple[str, str], ...]
    kept: str
    flags: tuple[str, ...] = ()


def report(planned: Planned, price: float | None) -> Iterator[str]:
    """Lines of text; `price` is that of an hour."""
    for name, value in _given(planned):
        yield f"{name:<{_WIDTH}}{value}"
    yield ""
    yield from _memory(planned)
    yield ""
    for name, value in _expected(planned, price):
        yield f"{name:<{_WIDTH}}{value}"


def _given(planned: Planned) -> Iterator[tuple[str, str]]:
    sizes, work = planned.sizes, planned.work
    yield "model", (f"{planned.model_type}, {_count(sizes.parameters)} parameters, a token meets "
                    f"{_count(sizes.active_parameters)}")
    yield "weights", f"{planned.weight_bytes:,} bytes {planned.kept}"
    yield from planned.where
    yield "workload", (f"{work.rows:,} rows, prompts of {work.prompt_tokens:,} and answers of {work.output_tokens:,} "
                       "tokens in the mean")


def _count(number: int) -> str:
    return f"{number / 1e9:,.1f} billion" if number >= 10**9 else f"{number / 1e6:,.1f} million"


def _memory(planned: Planned) -> Iterator[str]:
    """A table of bytes: what lies where."""
    placed, budgets = planned.plan.placement, planned.budgets
    tiers = ("memory", "disk") if budgets.unified else ("devices", "host", "disk")
    yield f"{'bytes':<28}" + "".join(f"{tier:>20}" for tier in tiers)
    for name, *sizes in (
            ("weights always needed", placed.fixed, 0, 0),
            ("weights of layers", placed.resident, placed.host_weights, placed.disk_weights),
            ("buffers for weights", placed.buffers, placed.host_buffers, 0),
            ("keys and values", placed.kv_device, placed.kv_host, 0),
            ("workspace of a pass", placed.workspace, 0, 0),
            ("together", placed.device, placed.host, placed.disk_weights),
            ("there are", budgets.device, budgets.host)):
        shown = [sizes[0], *sizes[2:]] if budgets.unified else sizes
        yield f"{name:<28}" + "".join(f"{size:>20,}" for size in shown)


def _expected(planned: Planned, price: float | None) -> Iterator[tuple[str, str]]:
    plan, work = planned.plan, planned.work
    choice = plan.choice
    yield "attention", f"in sub-batches of {choice.b_attn:,} rows (of a prompt up to {work.chunk_tokens:,} tokens each)"
    yield "experts" if any(layer.experts for layer in planned.sizes.layers) else "feed-forward", (
        f"once for {plan.rows:,} rows (prompts: {choice.b_moe:,} tokens)")
    yield "layers", _layers(planned)
    yield "why", _reason(plan)
    yield "step", f"{plan.step:.3g} s; a pass over prompts {plan.prompt_pass:.3g} s"
    speed = work.rows * work.output_tokens / plan.seconds
    yield "expected", (f"{speed:,.0f} answer tokens/s, {timedelta(seconds=round(plan.seconds))} until the last row; "
                       "long tails are left out")
    if price is not None:
        cost = plan.seconds / 3600 * price
        yield "cost", f"{cost:,.2f} at {price:g} an hour, {cost / work.rows * 1000:,.4f} per 1,000 rows"
    if planned.budgets.unified:
        yield "run with", " ".join((*planned.flags, *_flags(plan)))


def _layers(planned: Planned) -> str:
    """Where their weights are."""
    tiers = planned.plan.placement.tiers
    counts = {tier: tiers.count(tier) for tier in Tier}
    if counts[Tier.DEVICE] == len(tiers):
        return f"all {len(tiers)} layers in memory"
    places = [f"{counts[Tier.DEVICE]} layers in memory"]
    places += [f"{counts[tier]} from the {tier}" for tier in (Tier.HOST, Tier.DISK) if counts[tier]]
    return f"{', '.join(places)}; {_way(planned)}"


def _way(planned: Planned) -> str:
    """How weights come that are not in memory."""
    placement, choice = planned.plan.placement, planned.plan.choice
    if placement.limit is not None:
        return f"what every token needs stays first, the rest is read in each pass through {placement.ring} buffers"
    parts = "with their attention" if choice.whole else "without their attention"
    what = "chosen experts only, after the router" if choice.on_demand else "ahead of use"
    return f"{parts}, in {choice.chunks} pieces through {choice.buffers} buffers, {what}"


def _reason(plan: BatchPlan) -> str:
    """What a step waits for, and what it costs beside that."""
    busiest = plan.bottleneck
    others = ", ".join(f"{name} {plan.busy[name]:.3g} s" for name in Resource
                       if name is not busiest and plan.busy[name])
    tail = f"; beside it {others}" if others else ""
    return f"{busiest} takes {plan.busy[busiest]:.3g} s of a step of {plan.step:.3g} s{tail}"


def _flags(plan: BatchPlan) -> Iterator[str]:
    """What makes `batchgen-beam run` do the same."""
    yield f"--max-rows={plan.rows}"
    yield f"--step-tokens={max(plan.rows, plan.choice.b_moe)}"
    streams = plan.placement.disk_weights > 0
    if plan.choice.b_attn < plan.rows or streams:
        yield f"--attention-batch={plan.choice.b_attn if plan.choice.b_attn < plan.rows else 0}"
    yield f"--kv-memory={plan.placement.kv_device}"
    if streams:
        yield f"--weight-memory={plan.placement.limit}"
