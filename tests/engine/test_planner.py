"""Laws of the planner: the known optimum, whatever the order; limits obeyed and counted; refusals with numbers."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from batchgen_beam.config.model_registry import load_config
from batchgen_beam.config.model_sizes import model_sizes
from batchgen_beam.config.sizes import WeightForm
from batchgen_beam.engine.device_profile import load_profile
from batchgen_beam.engine.layer_graph import Resource
from batchgen_beam.engine.model_load import LayerLoad, ModelLoad
from batchgen_beam.engine.planner import choices, evaluate, plan_batches
from batchgen_beam.engine.roofline import Roofline
from batchgen_beam.engine.tiers import Budgets, Choice, Placement, Shortage, Tier, Workload, place
from batchgen_beam.errors import OptionError
from tests.config.test_sizes import R1

MB, GB = 10**6, 10**9

MOE = LayerLoad(attention_bytes=2 * MB, attention_flops=2 * MB, context_flops=4096, fixed_bytes=MB // 10,
                fixed_flops=MB // 10, expert_bytes=4 * MB, expert_flops=4 * MB, experts=16, experts_per_token=2,
                kv_token_bytes=1024, attention_width=8192, feed_forward_width=16384)
MODEL = ModelLoad(layers=(MOE,) * 6, embedding_bytes=4 * MB, head_bytes=4 * MB, head_flops=4 * MB, vocabulary=1000,
                  context=4096, state_width=1024)
WORK = Workload(rows=100, prompt_tokens=64, output_tokens=64)


@dataclass(frozen=True)
class Synthetic:
    """Costs that are simple enough to know by hand: a fixed part of each call and a rate."""

    disk: float = 1e9
    to_device: float | None = None
    to_host: float | None = None
    call: float = 1e-4

    def attention(self, layer: LayerLoad, tokens: int, context: float, *, prompt: bool) -> float:
        return self.call + tokens * (1e-6 + context * 1e-8)

    def feed_forward(self, layer: LayerLoad, tokens: int) -> float:
        return self.call + tokens * 4e-6

    def combine(self, tokens: int) -> float:
        return tokens * 1e-7

    def head(self, tokens: int) -> float:
        return tokens * 1e-6


UNIFIED = Budgets(device=300 * MB, weights=150 * MB, unified=True)


@pytest.mark.parametrize(("costs", "budgets"), [
    (Synthetic(), UNIFIED),
    (Synthetic(disk=5e7), replace(UNIFIED, device=200 * MB)),
    (Synthetic(to_device=1e9, to_host=1e9), Budgets(device=150 * MB, host=400 * MB)),
    (Synthetic(to_device=1e8, to_host=1e8), Budgets(device=90 * MB, host=300 * MB)),
    (Synthetic(), Budgets(device=10 * GB, unified=True)),
])
def test_no_other_choice_is_better(costs: Synthetic, budgets: Budgets) -> None:
    """Brute force over all choices, without any bound, finds the same plan."""
    plan = plan_batches(MODEL, costs, budgets, WORK)
    plans = [evaluate(MODEL, costs, WORK, choice, placement)
             for choice in choices(MODEL, costs, budgets, WORK)
             if isinstance(placement := place(MODEL, budgets, WORK, choice), Placement)]
    assert len(plans) > 10
    assert plan == min(plans, key=lambda one: (one.seconds, one.choice))


def test_known_optimum_where_everything_fits() -> None:
    """A fixed cost of each call: the fewest calls win, so one sub-batch of all rows, and prompts in one pass."""
    plan = plan_batches(MODEL, Synthetic(call=1.0), Budgets(device=100 * GB, unified=True), WORK)
    assert plan.rows == 100
    assert plan.choice.b_attn == WORK.rows
    assert plan.choice.b_moe >= WORK.rows * WORK.prompt_tokens
    assert plan.step == pytest.approx(6 * 2.0, rel=0.01)
    assert set(plan.placement.tiers) == {Tier.DEVICE}


def test_known_optimum_where_the_disk_is_all_that_counts() -> None:
    """A very slow disk: as many rows as there are, and a step that lasts as long as its reads."""
    costs = Synthetic(disk=1e6, call=1e-6)
    plan = plan_batches(MODEL, costs, UNIFIED, WORK)
    assert plan.rows == WORK.rows
    assert plan.bottleneck is Resource.DISK
    assert plan.step == pytest.approx(plan.placement.disk_weights / costs.disk, rel=0.02)


def test_few_rows_read_only_the_experts_that_they_choose() -> None:
    """One row of 2 experts in 16: reading an eighth after the router beats reading all ahead."""
    plan = plan_batches(MODEL, Synthetic(disk=1e8), UNIFIED, Workload(rows=1, prompt_tokens=1, output_tokens=64))
    assert plan.choice.on_demand
    assert plan.busy[Resource.DISK] == pytest.approx(
        2 * 4 * MB * sum(tier is Tier.DISK for tier in plan.placement.tiers) / 1e8)


@pytest.mark.parametrize(("experts", "chosen", "tokens", "distinct"), [
    (16, 2, 1, 2.0), (16, 2, 2, 2 + 2 * 14 / 16), (256, 8, 100000, 256.0), (4, 4, 1, 4.0)])
def test_expected_distinct_experts(experts: int, chosen: int, tokens: int, distinct: float) -> None:
    """One token touches its k; each further one touches k, less those that were touched."""
    layer = replace(MOE, experts=experts, experts_per_token=chosen)
    assert layer.touched(tokens) == pytest.approx(distinct)


def test_bytes_on_each_tier_add_up() -> None:
    """Nothing is lost: what is fixed, resident, on the host and on the disk is the model; no budget is passed."""
    costs, budgets = Synthetic(to_device=1e9, to_host=1e9), Budgets(device=150 * MB, host=250 * MB)
    fitting = 0
    for choice in choices(MODEL, costs, budgets, WORK):
        placement = place(MODEL, budgets, WORK, choice)
        if isinstance(placement, Shortage):
            assert placement.missing > 0
            assert all(needed > given for _, needed, given in placement.budgets)
            continue
        fitting += 1
        weights = placement.fixed + placement.resident + placement.host_weights + placement.disk_weights
        assert weights == MODEL.weight_bytes
        assert placement.device <= budgets.device
        assert placement.host <= budgets.host
        kv = MODEL.kv_bytes(min(choice.b_moe, WORK.rows), 128)
        assert (placement.kv_host if choice.kv_on_host else placement.kv_device) == kv
    assert fitting > 10


def test_resident_layers_are_spread_evenly() -> None:
    """Three of six: streamed layers have resident ones between them, so that reading hides behind computing."""
    choice = Choice(b_attn=1, b_moe=1, chunks=16, buffers=2)
    one = place(MODEL, Budgets(device=250 * MB, unified=True), WORK, choice)
    assert isinstance(one, Placement)
    on_device = [tier is Tier.DEVICE for tier in one.tiers]
    assert sum(on_device) == 3
    assert on_device not in ([True] * 3 + [False] * 3, [False] * 3 + [True] * 3)


@pytest.mark.parametrize(("costs", "budgets", "names"), [
    (Synthetic(), Budgets(device=5 * MB, unified=True), ("device",)),
    (Synthetic(), Budgets(device=GB, weights=3 * MB, unified=True), ("weight",)),
    (Synthetic(), Budgets(device=GB, weights=0, unified=True), ("weight",)),
    (Synthetic(to_device=1e9, to_host=1e9), Budgets(device=100 * MB, host=0), ("host",)),
    (Synthetic(to_device=1e9, to_host=1e9), Budgets(device=5 * MB, host=0), ("device", "host")),
])
def test_what_can_not_fit_is_refused_with_the_numbers(costs: Synthetic, budgets: Budgets,
                                                      names: tuple[str, ...]) -> None:
    """The message has what is needed of each budget, what there is, and the flags; with so much a plan is found, with a
    byte less none is."""
    with pytest.raises(OptionError) as refused:
        plan_batches(MODEL, costs, budgets, WORK)
    found = re.findall(r"([\d,]+) bytes of (\w+) memory \(there are ([\d,]+)\)", str(refused.value))
    assert tuple(what for _, what, _ in found) == names
    assert str(refused.value).endswith("raise " + ", ".join(f"--{name}-memory" for name in names))
    fields = {"device": "device", "host": "host", "weight": "weights"}
    enough = {fields[what]: int(needed.replace(",", "")) for needed, what, _ in found}
    assert plan_batches(MODEL, costs, replace(budgets, **enough), WORK).rows >= 1
    for field, least in enough.items():
        with pytest.raises(OptionError):
            plan_batches(MODEL, costs, replace(budgets, **{**enough, field: least - 1}), WORK)


def test_windows_bound_what_is_read_and_kept() -> None:
    """A window of 128 tokens costs 128 however long the row, and keeps the 3 pages that it touches and one to grow
    into; one row at a time has the pages of the whole context."""
    layer, page = replace(MOE, window=128), 64 * 1024
    assert layer.kv_bytes(100, 6400, 6400) == (99 * 4 + 100) * page
    assert layer.kv_bytes(100, 100, 6400) == 100 * 2 * page
    assert layer.seen(10_000) == 128
    assert MOE.kv_bytes(3, 65, 6400) == 3 * 2 * page


def deepseek_r1(folder: Path) -> ModelLoad:
    """From its config.json alone."""
    (folder / "config.json").write_text(json.dumps(R1))
    config = load_config(str(folder))
    return ModelLoad.of(model_sizes(config), WeightForm(dtype="bfloat16", stored=config.quantization), "auto")


ROWS = Workload(rows=10_000, prompt_tokens=500, output_tokens=500)
EXPERT = 3 * 2048 * 7168 + 3 * 4 * 16 * 56
"""Stored bytes of one of DeepSeek-R1's experts: fp8, and a float32 for each block of 128 x 128."""


@pytest.mark.parametrize(("name", "devices", "host"), [("a5000", 1, 1000 * GB), ("h100_sxm", 8, 2000 * GB)])
def test_deepseek_r1_memory_by_hand(name: str, devices: int, host: int, tmp_path: Path) -> None:
    """All its experts are 58 x 256; a row of 1,000 tokens keeps 16 pages of 64 in 61 layers of 576 bfloat16."""
    model, profile = deepseek_r1(tmp_path), load_profile(name)
    assert profile.memory * devices == {"a5000": 24 * GB, "h100_sxm": 640 * GB}[name]
    plan = plan_batches(model, Roofline(profile=profile, model=model, devices=devices),
                        Budgets(device=profile.memory * devices, host=host, devices=devices), ROWS)
    placement = plan.placement
    assert sum(layer.experts * layer.expert_bytes for layer in model.layers) == 58 * 256 * EXPERT == 654_068_416_512
    assert model.kv_bytes(1, 1000) == 61 * 16 * 64 * 576 * 2 == 71_958_528
    kv = placement.kv_host or placement.kv_device
    assert kv == plan.rows * 71_958_528
    attention = sum(layer.attention_bytes for layer in model.layers)
    assert placement.fixed + placement.resident + placement.host_weights + placement.disk_weights == (
        model.weight_bytes + (devices - 1) * attention)
    assert placement.device <= profile.memory * devices
    assert placement.host <= host


def test_roofline_by_hand(tmp_path: Path) -> None:
    """One step of one row of DeepSeek-R1's experts on an A5000 is its bytes, of 100,000 tokens its operations."""
    model, profile = deepseek_r1(tmp_path), load_profile("a5000")
    costs, layer = Roofline(profile=profile, model=model), model.layers[10]
    fixed = 2 * 256 * 7168 + 4 * 256 + 2 * 7168 + EXPERT
    assert costs.feed_forward(layer, 1) == pytest.approx((fixed + 8 * EXPERT) / 768e9)
    assert costs.feed_forward(layer, 100_000) == pytest.approx(
        100_000 * 2 * (256 * 7168 + 9 * 3 * 2048 * 7168) / 111.1e12)
    assert costs.combine(100) == 0.0
    eight = Roofline(profile=profile, model=model, devices=8)
    assert eight.feed_forward(layer, 100_000) == pytest.approx(costs.feed_forward(layer, 100_000) / 8)
    assert eight.combine(100) == pytest.approx(2 * 100 * 7168 * 2 * 7 / 8 / (8 * 32e9))


def test_more_memory_never_makes_a_plan_slower() -> None:
    """Each step up in device memory keeps or shortens the time to the last row."""
    times = [plan_batches(MODEL, Synthetic(disk=1e8), Budgets(device=size * MB, unified=True), WORK).seconds
             for size in (60, 120, 240, 480)]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]


def test_equal_inputs_give_equal_plans() -> None:
    """Nothing but the arguments decides."""
    plans = [plan_batches(MODEL, Synthetic(), UNIFIED, WORK) for _ in range(2)]
    assert plans[0] == plans[1]
