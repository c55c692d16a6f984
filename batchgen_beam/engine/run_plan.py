"""The plan of a run on this machine: its weights are where a run's loader puts them, by the same rule.

Owns the step from a residency to what each layer reads in a pass.  Memory is one, and what is streamed comes from the
disk: a run has no other way.  Pure; does not know where costs and needs come from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from functools import cache

from batchgen_beam.engine.model_load import ModelLoad
from batchgen_beam.engine.planner import BatchPlan, Costs, batches, fastest
from batchgen_beam.engine.tiers import Budgets, Choice, LayerStream, Placement, Shortage, Workload, pass_bytes
from batchgen_beam.settings import EngineSettings
from batchgen_beam.weights.residency import Residency, Unit
from batchgen_beam.weights.weight_needs import WeightNeeds

__all__ = ["fit_batches", "place_run", "plan_run"]

ROW_TOKENS = 512
"""Tokens that a row nobody has seen is taken to have, prompt and answer."""

MOST_ROWS = 4096
LEAST_ROOM = 256 << 20
"""Bytes that a pass may take however little is free; the engine's default batch takes no less of a small model."""

LONGEST_PASS = 5.0
"""Seconds of a pass over prompts: a process that was told to go has ten for the pass that it is in."""

LONGEST_READS = 2
"""Over a slow disk a pass may take as long as so many reads of all that is streamed: shorter ones serve few tokens."""

_ATTENTION = ".attention"


def plan_run(model: ModelLoad, needs: WeightNeeds, costs: Costs, budgets: Budgets, work: Workload) -> BatchPlan:
    """The plan that answers `work` soonest.  `OptionError`, with the numbers, where none fits."""
    residencies = cache(needs.residency)
    least = needs.least()

    def place(choice: Choice) -> Placement | Shortage:
        kv, workspace = model.kv_bytes(min(choice.b_moe, work.rows), work.row_tokens), pass_bytes(model, work, choice)
        limit = _limit(needs, budgets, kv + workspace)
        if limit < least:
            return _shortage(budgets, least, kv + workspace)
        return place_run(model, needs, residencies(limit), limit=limit, kv=kv, workspace=workspace)

    choices = (Choice(b_attn=b_attn, b_moe=b_moe) for b_attn, b_moe in batches(work))
    return fastest(model, costs, work, ((choice, place(choice)) for choice in choices), needs.total_bytes)


def fit_batches(model: ModelLoad, needs: WeightNeeds, costs: Costs, settings: EngineSettings, *,
                free: int) -> BatchPlan:
    """The batches for rows that nobody has seen, under the settings' memory of weights, keys and values.

    Rows are taken to have as many tokens as half of the context, `ROW_TOKENS` at most, half of them prompts, and there
    are as many of them as keys and values have room for.  What a pass takes besides fits into `free` bytes beside the
    weights; it lasts `LONGEST_PASS`, `LONGEST_READS` where that is longer, or as little more as can be.
    """
    context = min(model.context, settings.max_context or model.context)
    half = max(1, min(ROW_TOKENS, context // 2) // 2)
    most = MOST_ROWS if "max_rows" in settings.left_open else settings.max_rows
    rows = bisect_right(range(1, most + 1), settings.kv_memory, key=lambda count: model.kv_bytes(count, 2 * half))
    work = Workload(rows=max(1, rows), prompt_tokens=half, output_tokens=half)
    residency = needs.residency(settings.weight_memory)
    room = max(free - settings.weight_memory - settings.kv_memory, LEAST_ROOM)

    def place(choice: Choice) -> Placement | Shortage:
        workspace = pass_bytes(model, work, choice)
        if workspace > room and (choice.b_attn, choice.b_moe) != (1, 1):
            return Shortage(budgets=(("pass", workspace, room),))
        return place_run(model, needs, residency, limit=settings.weight_memory,
                         kv=model.kv_bytes(min(choice.b_moe, work.rows), work.row_tokens), workspace=workspace)

    choices = (Choice(b_attn=b_attn, b_moe=b_moe) for b_attn, b_moe in batches(work))
    return fastest(model, costs, work, ((choice, place(choice)) for choice in choices), needs.total_bytes,
                   longest=max(LONGEST_PASS, LONGEST_READS * residency.streamed_bytes / costs.disk))


def _limit(needs: WeightNeeds, budgets: Budgets, rest: int) -> int:
    """Bytes that weights may take beside the rest; no more than all of them do."""
    given = needs.total_bytes if budgets.weights is None else budgets.weights
    return min(budgets.device - rest, given, needs.total_bytes)


def _shortage(budgets: Budgets, least: int, rest: int) -> Shortage:
    needed = (("device", least + rest, budgets.device),
              ("weight", least, least if budgets.weights is None else budgets.weights))
    return Shortage(budgets=tuple((what, need, given) for what, need, given in needed if need > given))


def place_run(model: ModelLoad, needs: WeightNeeds, residency: Residency, *, limit: int, kv: int,
              workspace: int) -> Placement:
    """What lies where under a residency for `limit` bytes."""
    return Placement(
        places=_streams(model, needs, residency), ring=max(2, residency.buffers), limit=limit,
        fixed=residency.fixed_bytes, resident=residency.resident_bytes,
        buffers=residency.buffers * residency.buffer_bytes + residency.scratch_bytes, kv_device=kv,
        workspace=workspace, host_weights=0, host_buffers=0, kv_host=0, disk_weights=residency.streamed_bytes)


def _streams(model: ModelLoad, needs: WeightNeeds, residency: Residency) -> tuple[LayerStream, ...]:
    """What each layer reads."""
    streamed: defaultdict[int, list[Unit]] = defaultdict(list)
    for unit in needs.units:
        if unit.name in residency.streamed:
            streamed[unit.layer].append(unit)
    return tuple(_stream(streamed[layer]) for layer in range(len(model.layers)))


def _stream(units: list[Unit]) -> LayerStream:
    experts = [unit.size for unit in units if unit.rank is not None]
    always = [unit for unit in units if unit.rank is None]
    attention = sum(unit.size for unit in always if unit.name.endswith(_ATTENTION))
    return LayerStream(attention=attention, always=sum(unit.size for unit in always) - attention,
                       experts=len(experts), expert=max(experts, default=0))
