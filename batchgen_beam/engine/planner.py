"""Which batches, buffers and places of weights finish a workload soonest: a pure function of costs and budgets.

Enumerates choices, drops those that do not fit, and takes the one whose passes have the shortest schedule; ties go to
the least choice.  A choice whose busiest resource alone takes longer than the best plan so far is not scheduled, which
changes nothing in the result.  Does not know where costs come from, tensors, files or time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil, inf
from typing import Protocol

from batchgen_beam.engine.layer_graph import LayerWork, Resource, least_seconds, pass_tasks, schedule
from batchgen_beam.engine.model_load import LayerLoad, ModelLoad
from batchgen_beam.engine.tiers import (
    Budgets,
    Choice,
    LayerStream,
    Placement,
    Shortage,
    Tier,
    Workload,
    place,
    streamable,
)
from batchgen_beam.errors import OptionError

__all__ = ["BatchPlan", "Costs", "batches", "choices", "evaluate", "fastest", "plan_batches"]

_MOST_SUB_BATCHES = 16
_MOST_TOKENS = 1 << 16
_BUFFERS = (2, 3)
_CHUNKS = (1, 4, 16)
_SURE = 0.5
"""All streamed experts of a layer are chosen where less than half a one is expected not to be."""


class Costs(Protocol):
    """Seconds of compute tasks on all devices together, and rates of the links in bytes/s; None: no such link."""

    @property
    def disk(self) -> float:
        """What the host reads from the disk."""

    @property
    def to_device(self) -> float | None:
        """From the host to the devices."""

    @property
    def to_host(self) -> float | None:
        """From the devices to the host."""

    def attention(self, layer: LayerLoad, tokens: int, context: float, *, prompt: bool) -> float:
        """The attention half of a sub-batch whose tokens see `context` tokens each; `prompt`: rows have many."""

    def feed_forward(self, layer: LayerLoad, tokens: int) -> float:
        """Router, experts and dense part of all tokens of a pass."""

    def combine(self, tokens: int) -> float:
        """Gathering the sub-batches' states into one batch, and handing them back."""

    def head(self, tokens: int) -> float:
        """Logits and sampling, and whatever else a pass takes once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """A plan, and what is expected of it.

    `step` and `prompt_pass` are seconds of one pass of answers and of prompts, `busy` what each resource works in a
    step; `seconds` until the last row is done, long tails left out.
    """

    choice: Choice
    placement: Placement
    rows: int
    step: float
    prompt_pass: float
    busy: dict[Resource, float]
    seconds: float

    @property
    def bottleneck(self) -> Resource:
        """What a step waits for most."""
        return max(Resource, key=lambda one: self.busy[one])


def plan_batches(model: ModelLoad, costs: Costs, budgets: Budgets, work: Workload) -> BatchPlan:
    """The plan that answers `work` soonest.  `OptionError`, with the numbers, where none fits."""
    placed = ((choice, place(model, budgets, work, choice)) for choice in choices(model, costs, budgets, work))
    return fastest(model, costs, work, placed, model.weight_bytes)


def fastest(model: ModelLoad, costs: Costs, work: Workload, placed: Iterable[tuple[Choice, Placement | Shortage]],
            weight_bytes: int, *, longest: float = inf) -> BatchPlan:
    """Of the choices that fit the one that answers `work` soonest; `OptionError` where none does.

    A pass over prompts takes at most `longest` seconds, or as little more as can be.
    """
    fitting: list[tuple[tuple[float, float], Choice, Placement]] = []
    shortages: list[tuple[int, Choice, Shortage]] = []
    for choice, placement in placed:
        if isinstance(placement, Placement):
            fitting.append((_bound(model, costs, work, choice, placement, longest), choice, placement))
        else:
            shortages.append((placement.missing, choice, placement))
    if not fitting:
        raise _refusal(weight_bytes, min(shortages, key=lambda one: one[:2])[2])
    best: tuple[tuple[float, float], Choice, BatchPlan] | None = None
    for bound, choice, placement in sorted(fitting, key=lambda one: one[:2]):
        if best is not None and bound > best[0]:
            break
        plan = evaluate(model, costs, work, choice, placement)
        found = (max(0.0, plan.prompt_pass - longest), plan.seconds), choice, plan
        if best is None or found[:2] < best[:2]:
            best = found
    assert best is not None
    return best[2]


def _refusal(weight_bytes: int, shortage: Shortage) -> OptionError:
    needs = " and ".join(f"{needed:,} bytes of {what} memory (there are {given:,})"
                         for what, needed, given in shortage.budgets)
    flags = ", ".join(f"--{what}-memory" for what, _, _ in shortage.budgets)
    return OptionError(f"the model's weights take {weight_bytes:,} bytes, and no plan fits: the least one needs "
                       f"{needs}; raise {flags}")


def batches(work: Workload) -> Iterator[tuple[int, int]]:
    """Rows of an attention sub-batch and tokens of a pass that are considered; a grid of powers of two."""
    for b_moe in _grid(min(_MOST_TOKENS, work.rows * work.row_tokens), work.rows):
        rows = min(b_moe, work.rows)
        for b_attn in _grid(rows, rows):
            if b_attn * _MOST_SUB_BATCHES >= rows:
                yield b_attn, b_moe


def choices(model: ModelLoad, costs: Costs, budgets: Budgets, work: Workload) -> Iterator[Choice]:
    """All that is considered."""
    routed = any(layer.experts for layer in model.layers)
    streams = sum(streamable(layer, True) for layer in model.layers) > _room(model, budgets)
    for b_attn, b_moe in batches(work):
        for kv_on_host in (False, True)[:1 + (costs.to_device is not None)]:
            if not streams:
                yield Choice(b_attn=b_attn, b_moe=b_moe, kv_on_host=kv_on_host)
                continue
            for chunks in _CHUNKS if routed else _CHUNKS[:2]:
                for buffers in _BUFFERS:
                    for on_demand in (False, True)[:1 + routed]:
                        for whole in (False, True)[:1 + (budgets.devices == 1)]:
                            yield Choice(b_attn=b_attn, b_moe=b_moe, chunks=chunks, buffers=buffers,
                                         kv_on_host=kv_on_host, on_demand=on_demand, whole=whole)


def _room(model: ModelLoad, budgets: Budgets) -> int:
    """Device bytes for what may be streamed, if a single token ran; under it nothing ever is."""
    least = model.embedding_bytes + model.head_bytes
    return min(budgets.device, budgets.device if budgets.weights is None else budgets.weights) // 2 - least


def _grid(most: int, rows: int) -> list[int]:
    """Powers of two up to `most`, and `rows`."""
    return sorted({min(rows, most), *(1 << bit for bit in range(most.bit_length()))})


def evaluate(model: ModelLoad, costs: Costs, work: Workload, choice: Choice, placement: Placement) -> BatchPlan:
    """The schedule of both kinds of pass, and how long all of them take."""
    rows = min(choice.b_moe, work.rows)
    step = schedule(pass_tasks(*_pass(model, costs, work, choice, placement, rows, prompt=False), placement.ring))
    prompt = schedule(pass_tasks(*_pass(model, costs, work, choice, placement, _prompt_tokens(work, choice),
                                        prompt=True), placement.ring))
    return BatchPlan(choice=choice, placement=placement, rows=rows, step=step.seconds, prompt_pass=prompt.seconds,
                     busy=dict(step.busy), seconds=_total(work, choice, step.seconds, prompt.seconds))


def _prompt_tokens(work: Workload, choice: Choice) -> int:
    return min(choice.b_moe, work.rows * work.prompt_tokens)


def _total(work: Workload, choice: Choice, step: float, prompt: float) -> float:
    """Passes over all prompts, and steps that refill the place of a row as soon as it is done."""
    rows = min(choice.b_moe, work.rows)
    passes = ceil(work.rows * work.prompt_tokens / _prompt_tokens(work, choice))
    return passes * prompt + work.rows * work.output_tokens / rows * step


def _bound(model: ModelLoad, costs: Costs, work: Workload, choice: Choice, placement: Placement,
           longest: float) -> tuple[float, float]:
    """No schedule of the choice takes less: beyond `longest` in a pass over prompts, and in all."""
    step, prompt = (
        least_seconds(*_pass(model, costs, work, choice, placement, tokens, prompt=prompt), placement.ring) * (1 - 1e-9)
        for tokens, prompt in ((min(choice.b_moe, work.rows), False), (_prompt_tokens(work, choice), True)))
    return max(0.0, prompt - longest), _total(work, choice, step, prompt)


def _pass(model: ModelLoad, costs: Costs, work: Workload, choice: Choice, placement: Placement, tokens: int, *,
          prompt: bool) -> tuple[list[LayerWork], float]:
    """The layers of a pass of `tokens` tokens in the mean context of the workload, and the seconds of its head."""
    context = work.prompt_tokens / 2 if prompt else work.prompt_tokens + work.output_tokens / 2
    known: dict[tuple[LayerLoad, Tier | LayerStream], LayerWork] = {}
    chunk = work.chunk_tokens if prompt else 1
    cut = _Cut(count=tokens, context=context, prompt=prompt, sub_batch=min(choice.b_attn * chunk, tokens))
    for layer, where in zip(model.layers, placement.places, strict=True):
        if (layer, where) not in known:
            known[layer, where] = _layer(layer, where, costs, choice, cut)
    wanted = max(1, tokens // work.prompt_tokens) if prompt else tokens
    return [known[pair] for pair in zip(model.layers, placement.places, strict=True)], costs.head(wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """The tokens of a pass, their mean context, whether rows have many of them, and the tokens of a sub-batch."""

    count: int
    context: float
    prompt: bool
    sub_batch: int

    @property
    def sub_batches(self) -> int:
        return ceil(self.count / self.sub_batch)

    def attention(self, layer: LayerLoad, costs: Costs) -> float:
        """Seconds of a sub-batch."""
        return costs.attention(layer, self.sub_batch, self.context, prompt=self.prompt)


def _layer(layer: LayerLoad, where: Tier | LayerStream, costs: Costs, choice: Choice, tokens: _Cut) -> LayerWork:
    if isinstance(where, LayerStream):
        return _streamed(layer, where, costs, tokens)
    restore = offload = read = copy = 0.0
    if choice.kv_on_host and costs.to_device is not None and costs.to_host is not None:
        past = layer.seen(tokens.context) * layer.kv_token_bytes + layer.state_bytes
        restore = 0.0 if tokens.prompt else tokens.sub_batch * past / costs.to_device
        offload = tokens.sub_batch * layer.kv_token_bytes / costs.to_host
    streamed = 0.0 if where is Tier.DEVICE else float(streamable(layer, choice.whole))
    if choice.on_demand and layer.experts:
        streamed -= (layer.experts - layer.touched(tokens.count)) * layer.expert_bytes * (where is not Tier.DEVICE)
    chunks = choice.chunks if streamed else 1
    if where is Tier.DISK:
        read = streamed / chunks / costs.disk
    if costs.to_device is not None:
        copy = streamed / chunks / costs.to_device
    return LayerWork(
        attention=tokens.attention(layer, costs), sub_batches=tokens.sub_batches, restore=restore, offload=offload,
        combine=costs.combine(tokens.count), feed_forward=costs.feed_forward(layer, tokens.count) / chunks,
        chunks=chunks, read=read, copy=copy, on_demand=choice.on_demand and layer.experts > 0 and not choice.whole,
        whole=choice.whole)


def _streamed(layer: LayerLoad, stream: LayerStream, costs: Costs, tokens: _Cut) -> LayerWork:
    """A layer some units of which are read in each pass, those of experts only where a token is expected to choose
    them; unless that is all of them, not before the router has spoken."""
    touched = layer.touched(tokens.count)
    chosen = touched * stream.experts / max(1, layer.experts)
    size = stream.always + chosen * stream.expert
    pieces = bool(stream.always) + ceil(chosen)
    waiting = min(1.0, size / max(1.0, layer.fixed_bytes + touched * layer.expert_bytes))
    seconds = costs.feed_forward(layer, tokens.count)
    return LayerWork(
        attention=tokens.attention(layer, costs), sub_batches=tokens.sub_batches,
        attention_read=stream.attention / costs.disk,
        combine=costs.combine(tokens.count) + seconds * (1 - waiting),
        feed_forward=seconds * waiting / max(1, pieces), chunks=max(1, pieces),
        read=size / max(1, pieces) / costs.disk, on_demand=chosen < stream.experts - _SURE)
