"""Laws of a run's plan: the known optimum, weights where the loader's rule puts them, and one unit for sub-batches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from batchgen_beam.engine.layer_graph import Resource
from batchgen_beam.engine.model_load import LayerLoad
from batchgen_beam.engine.planner import BatchPlan, batches, evaluate
from batchgen_beam.engine.run_plan import LEAST_ROOM, LONGEST_PASS, MOST_ROWS, fit_batches, place_run, plan_run
from batchgen_beam.engine.tiers import Budgets, Choice, LayerStream, Placement, Tier, Workload, pass_bytes
from batchgen_beam.settings import BATCHES, EngineSettings
from batchgen_beam.weights.residency import Unit
from batchgen_beam.weights.weight_needs import WeightNeeds
from tests.engine.test_planner import GB, MB, MODEL, WORK, Synthetic

UNITS = tuple(unit for layer in range(6) for unit in (
    Unit(name=f"layers.{layer}.attention", layer=layer, size=2 * MB),
    *(Unit(name=f"layers.{layer}.experts.{e}", layer=layer, size=4 * MB, rank=e) for e in range(16))))
NEEDS = WeightNeeds(units=UNITS, fixed=10 * MB, unpacked=False)


def placed(limit: int, choice: Choice) -> Placement:
    """Where weights are under a limit."""
    return place_run(MODEL, NEEDS, NEEDS.residency(limit), limit=limit, kv=MODEL.kv_bytes(100, 128),
                     workspace=pass_bytes(MODEL, WORK, choice))


@pytest.mark.parametrize("limit", [NEEDS.least(), 60 * MB, 200 * MB, NEEDS.total_bytes])
def test_no_other_batch_is_better(limit: int) -> None:
    """Brute force over all batches finds the same plan, under the same residency."""
    plan = plan_run(MODEL, NEEDS, Synthetic(), Budgets(device=10 * GB, weights=limit, unified=True), WORK)
    choices = [Choice(b_attn=b_attn, b_moe=b_moe) for b_attn, b_moe in batches(WORK)]
    plans = [evaluate(MODEL, Synthetic(), WORK, choice, placed(limit, choice)) for choice in choices]
    assert len(plans) > 10
    best = min(plans, key=lambda one: (one.seconds, one.choice))
    assert (plan.choice, plan.seconds, plan.placement.places) == (best.choice, best.seconds, best.placement.places)


@pytest.mark.parametrize("limit", [NEEDS.least(), 60 * MB, 200 * MB, NEEDS.total_bytes])
def test_layers_read_what_is_not_resident(limit: int) -> None:
    """Layer by layer, the bytes of the residency's streamed units, attention's apart from those of experts."""
    placement, residency = placed(limit, Choice(b_attn=1, b_moe=1)), NEEDS.residency(limit)
    assert (placement.limit, placement.disk_weights) == (limit, residency.streamed_bytes)
    for layer, where in enumerate(placement.places):
        assert isinstance(where, LayerStream)
        read = [unit for unit in UNITS if unit.layer == layer and unit.name in residency.streamed]
        assert where.attention == sum(unit.size for unit in read if unit.rank is None)
        assert where.experts * where.expert == sum(unit.size for unit in read if unit.rank is not None)
        assert (placement.tiers[layer] is Tier.DISK) is bool(read)


def test_a_slow_disk_bounds_the_step() -> None:
    """All rows at once, in a step as long as its reads of all streamed experts."""
    costs = Synthetic(disk=1e6, call=1e-6)
    plan = plan_run(MODEL, NEEDS, costs, Budgets(device=10 * GB, weights=60 * MB, unified=True), WORK)
    assert plan.rows == WORK.rows
    assert plan.bottleneck is Resource.DISK
    assert plan.step == pytest.approx(plan.placement.disk_weights / costs.disk, rel=0.02)


def test_one_row_waits_for_its_own_experts_only() -> None:
    """Of 16 experts a token chooses 2: an eighth of the streamed ones is read."""
    work = Workload(rows=1, prompt_tokens=1, output_tokens=64)
    plan = plan_run(MODEL, NEEDS, Synthetic(disk=1e8), Budgets(device=GB, weights=60 * MB, unified=True), work)
    streamed = NEEDS.residency(60 * MB).streamed_bytes
    assert plan.busy[Resource.DISK] == pytest.approx(streamed / 8 / 1e8, rel=0.01)


@dataclass(frozen=True)
class Watched(Synthetic):
    """Costs that remember the sub-batches of attention that they were asked for."""

    asked: list[tuple[bool, int]] = field(default_factory=list)

    def attention(self, layer: LayerLoad, tokens: int, context: float, *, prompt: bool) -> float:
        self.asked.append((prompt, tokens))
        return super().attention(layer, tokens, context, prompt=prompt)


@pytest.mark.parametrize(("prompt", "chunk"), [(64, 64), (1000, 256)])
def test_a_sub_batch_is_so_many_rows_of_answers_and_of_prompts(prompt: int, chunk: int) -> None:
    """B_attn counts rows, as --attention-batch does: a token each of answers, of prompts as many as a pass takes."""
    work, costs, choice = replace(WORK, prompt_tokens=prompt), Watched(), Choice(b_attn=3, b_moe=4096)
    evaluate(MODEL, costs, work, choice, placed(NEEDS.total_bytes, choice))
    assert set(costs.asked) == {(False, 3), (True, 3 * chunk)}


def fitted(costs: Synthetic, free: int = 10 * GB, **settings: Any) -> BatchPlan:
    """For a worker that streams; keys and values of 100 rows of 512 tokens have room."""
    room = MODEL.kv_bytes(100, 512)
    return fit_batches(MODEL, NEEDS, costs, EngineSettings(**{
        "weight_memory": 60 * MB, "kv_memory": room, "left_open": BATCHES, **settings}), free=free)


def test_a_worker_takes_the_rows_that_its_memory_holds() -> None:
    """Where the disk is all that counts; of shorter rows more, and never more than the user or the engine allows."""
    slow = Synthetic(disk=1e6, call=1e-6)
    assert fitted(slow).rows == 100
    assert fitted(slow, max_context=256).rows == 400
    assert fitted(slow, max_rows=30, left_open=BATCHES[1:]).rows == 30
    assert fitted(slow, max_rows=30).rows == 100
    assert fitted(slow, kv_memory=1 << 44).rows == MOST_ROWS
    assert fitted(slow, kv_memory=0).rows == 1


@dataclass(frozen=True)
class Heavy(Synthetic):
    """Costs of a processor that takes long for each token."""

    def feed_forward(self, layer: LayerLoad, tokens: int) -> float:
        return self.call + tokens * 4e-3


@pytest.mark.parametrize(("costs", "longest"), [(Heavy(), LONGEST_PASS), (Heavy(disk=1e7), 2 * 35.6)])
def test_a_worker_takes_no_longer_passes_than_it_can_end_when_it_has_to_go(costs: Heavy, longest: float) -> None:
    """Of the batches whose passes are short enough the best, and a plan without that bound has longer ones; a pass over
    a slow disk may take twice as long as its reads."""
    work = Workload(rows=100, prompt_tokens=256, output_tokens=256)
    every = [evaluate(MODEL, costs, work, choice, placed(60 * MB, choice))
             for choice in (Choice(b_attn=b_attn, b_moe=b_moe) for b_attn, b_moe in batches(work))]
    short = [plan for plan in every if plan.prompt_pass <= longest]
    found, best = fitted(costs), min(short, key=lambda one: (one.seconds, one.choice))
    assert (found.choice, found.seconds) == (best.choice, best.seconds)
    assert longest / 3 < found.prompt_pass <= longest
    assert min(every, key=lambda one: one.seconds).prompt_pass > longest


def test_where_every_pass_is_too_long_a_worker_takes_the_shortest() -> None:
    """No batch is refused for that."""
    costs, work = Heavy(call=10.0), Workload(rows=100, prompt_tokens=256, output_tokens=256)
    choices = [Choice(b_attn=b_attn, b_moe=b_moe) for b_attn, b_moe in batches(work)]
    least = min(evaluate(MODEL, costs, work, choice, placed(60 * MB, choice)).prompt_pass for choice in choices)
    assert fitted(costs).prompt_pass == least > LONGEST_PASS


def test_a_pass_fits_into_what_is_free_beside_the_weights() -> None:
    """With little room the passes are smaller; with none, they are as small as can be."""
    costs = Synthetic(disk=1e6, call=1e-6)
    wide = replace(MODEL, vocabulary=50 * MB)
    settings = EngineSettings(weight_memory=60 * MB, kv_memory=0, max_rows=100, left_open=BATCHES[1:])
    much = fit_batches(wide, NEEDS, costs, replace(settings, kv_memory=GB), free=100 * GB)
    little = fit_batches(wide, NEEDS, costs, replace(settings, kv_memory=GB), free=0)
    assert much.placement.workspace > LEAST_ROOM >= little.placement.workspace
    none = fit_batches(replace(MODEL, vocabulary=GB), NEEDS, costs, replace(settings, kv_memory=GB), free=0)
    assert (none.choice.b_attn, none.choice.b_moe) == (1, 1)
