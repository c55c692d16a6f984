"""Laws of a run's plan: the known optimum, weights where the loader's rule puts them, and one unit for sub-batches."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from batchgen_beam.engine.layer_graph import Resource
from batchgen_beam.engine.model_load import LayerLoad
from batchgen_beam.engine.planner import batches, evaluate
from batchgen_beam.engine.run_plan import place_run, plan_run
from batchgen_beam.engine.tiers import Budgets, Choice, LayerStream, Placement, Tier, Workload, pass_bytes
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
