"""Laws of measured costs: what was measured comes out, lines between, slopes beyond, and nothing ever falls."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from batchgen_beam.engine.measured_costs import Curve, LayerTimes, MachineTimes, MeasuredCosts, Surface
from batchgen_beam.engine.model_load import LayerLoad, ModelLoad
from tests.engine.test_planner import MODEL, MOE

LINE = Curve((1, 4, 8), (2.0, 5.0, 6.0))
FLAT = Surface((0.0, 100.0), (LINE, LINE))
RISING = Surface((10.0, 110.0), (LINE, Curve((1, 4, 8), (3.0, 9.0, 16.0))))
TIMES = LayerTimes(decode=RISING, prompt=FLAT, feed_forward=LINE)


def costs(model: ModelLoad, *times: LayerTimes) -> MeasuredCosts:
    """Of a machine with these times."""
    return MeasuredCosts(model, MachineTimes(kinds=times, head=LINE, combine=0.25, disk=1e9))


@pytest.mark.parametrize(("tokens", "seconds"), [(1, 2.0), (4, 5.0), (8, 6.0), (2, 3.0), (6, 5.5), (16, 8.0), (0, 2.0)])
def test_points_lines_and_slopes(tokens: int, seconds: float) -> None:
    """Measured points, straight lines between, the last slope beyond; below the first as much as there."""
    assert LINE.at(tokens) == pytest.approx(seconds)


def test_chance_never_makes_more_tokens_faster() -> None:
    """A larger pass that was measured faster counts as fast as the smaller one."""
    assert Curve.of({8: 2.0, 1: 3.0, 16: 5.0}) == Curve((1, 8, 16), (3.0, 3.0, 5.0))


@pytest.mark.parametrize(("tokens", "seconds"), [
    ((), ()), ((1,), (1.0,)), ((1, 2), (1.0,)), ((2, 1), (1.0, 2.0)), ((1, 1), (1.0, 2.0)), ((1, 2), (2.0, 1.0)),
    ((1, 2), (-1.0, 1.0))])
def test_what_is_no_curve(tokens: tuple[int, ...], seconds: tuple[float, ...]) -> None:
    """Refused where it is made, not where it is used."""
    with pytest.raises(ValueError, match=r"ascend|fall"):
        Curve(tokens, seconds)


@pytest.mark.parametrize(("tokens", "context", "seconds"), [
    (4, 10, 5.0), (4, 110, 9.0), (4, 60, 7.0), (4, 210, 13.0), (8, 110, 16.0), (4, 0, 4.6)])
def test_the_context_counts_in_proportion(tokens: int, context: float, seconds: float) -> None:
    """Straight through the two measured lengths, on both sides."""
    assert RISING.at(tokens, context) == pytest.approx(seconds)


def test_a_longer_context_is_never_faster() -> None:
    """Chance between the two lengths counts as no difference; nothing takes less than no time."""
    falling = Surface((10.0, 20.0), (Curve((1, 2), (3.0, 4.0)), Curve((1, 2), (1.0, 2.0))))
    assert falling.at(1, 1000) == 3.0
    steep = Surface((10.0, 20.0), (Curve((1, 2), (0.0, 0.0)), Curve((1, 2), (9.0, 9.0))))
    assert steep.at(1, 1) == 0.0


def test_each_kind_has_its_own_times() -> None:
    """In the order in which kinds come first; answers and prompts have their own surfaces."""
    dense = replace(MOE, experts=0)
    model = replace(MODEL, layers=(dense, MOE, dense))
    other = LayerTimes(decode=FLAT, prompt=RISING, feed_forward=Curve((1, 2), (7.0, 7.0)))
    found = costs(model, TIMES, other)
    assert (found.feed_forward(dense, 4), found.feed_forward(MOE, 4)) == (5.0, 7.0)
    assert found.attention(dense, 4, 110.0, prompt=False) == pytest.approx(9.0)
    assert found.attention(dense, 4, 110.0, prompt=True) == pytest.approx(5.0)
    assert found.attention(MOE, 4, 110.0, prompt=True) == pytest.approx(9.0)
    assert (found.head(8), found.combine(8), found.disk) == (6.0, 2.0, 1e9)
    with pytest.raises(ValueError, match="2 kinds of layers, times of 1"):
        costs(model, TIMES)


@pytest.mark.parametrize(("window", "context", "seconds"), [
    (None, 1000, 9.0 + 8.9 * 4), (50, 60, 7.0), (50, 1000, 9.0), (210, 1000, 13.0)])
def test_beyond_its_window_a_layer_takes_no_longer(window: int | None, context: float, seconds: float) -> None:
    """A window that ends within the measured lengths has its effect in the measurement already."""
    layer: LayerLoad = replace(MOE, window=window)
    found = costs(replace(MODEL, layers=(layer,)), TIMES)
    assert found.attention(layer, 4, context, prompt=False) == pytest.approx(seconds)


def test_times_survive_a_file() -> None:
    """What is read is what was written; another form is an error that readers know."""
    times = MachineTimes(kinds=(TIMES, replace(TIMES, decode=FLAT)), head=LINE, combine=0.25, disk=1e9)
    assert MachineTimes.from_json(json.loads(json.dumps(times.to_json()))) == times
    broken: dict[str, Any] = json.loads(json.dumps(times.to_json()))
    broken["kinds"][0]["decode"]["curves"].pop()
    with pytest.raises((KeyError, TypeError, ValueError)):
        MachineTimes.from_json(broken)
