"""Which weights stay in memory is arithmetic: within the limit, complete, and the better the more there is."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen_beam.errors import OptionError
from batchgen_beam.weights.residency import Residency, Unit, choose_residency, streaming_order

FIXED = 100

Sizes = tuple[int, int, int, int]
"""Layers, bytes of what every token needs of each, experts of each, bytes of an expert."""

SIZES = st.tuples(st.integers(1, 6), st.integers(1, 400), st.integers(0, 9), st.integers(1, 300))


def model(sizes: Sizes) -> list[Unit]:
    """Layers that are all alike."""
    layers, always, experts, expert = sizes
    return [unit for layer in range(layers)
            for unit in (Unit(name=f"{layer}", layer=layer, size=always),
                         *(Unit(name=f"{layer}.{e}", layer=layer, size=expert, rank=e) for e in range(experts)))]


def least(units: list[Unit], *, unpacked: bool = False) -> int:
    """What a refusal asks for."""
    with pytest.raises(OptionError) as refused:
        choose_residency(units, limit=0, fixed=FIXED, unpacked=unpacked)
    found = re.search(r"at least ([\d,]+) bytes", str(refused.value))
    assert found is not None
    return int(found[1].replace(",", ""))


def plan(units: list[Unit], limit: int, *, unpacked: bool = False) -> Residency:
    """The plan under `limit`."""
    return choose_residency(units, limit=limit, fixed=FIXED, unpacked=unpacked)


@given(sizes=SIZES, more=st.integers(0, 3000), unpacked=st.booleans())
def test_a_plan_keeps_the_limit_and_names_every_unit_once(sizes: Sizes, more: int, unpacked: bool) -> None:
    """Resident and streamed units are all units, buffers hold the largest streamed one, and the sum is right."""
    units = model(sizes)
    limit = least(units, unpacked=unpacked) + more
    found = plan(units, limit, unpacked=unpacked)
    assert found.total_bytes <= limit
    assert not found.resident & found.streamed
    assert found.resident | found.streamed == {unit.name for unit in units}
    streamed = [unit.size for unit in units if unit.name in found.streamed]
    assert found.streamed_bytes == sum(streamed)
    assert found.resident_bytes == sum(unit.size for unit in units) - sum(streamed)
    assert found.buffers >= 2 or not streamed
    assert max(streamed, default=0) <= found.buffer_bytes
    assert found.scratch_bytes == (found.buffer_bytes if unpacked else 0)


@given(sizes=SIZES, unpacked=st.booleans())
def test_the_refusal_names_the_least_that_is_accepted(sizes: Sizes, unpacked: bool) -> None:
    """One byte less than it says is refused with the same number, and what it says is enough."""
    units = model(sizes)
    needed = least(units, unpacked=unpacked)
    plan(units, needed, unpacked=unpacked)
    with pytest.raises(OptionError, match=rf"^--weight-memory={needed - 1:,} is too little: .* least {needed:,} bytes"):
        plan(units, needed - 1, unpacked=unpacked)


@given(sizes=SIZES)
def test_all_is_resident_as_soon_as_all_fits(sizes: Sizes) -> None:
    """Exactly all bytes are enough, and then nothing is streamed and no buffer taken."""
    units = model(sizes)
    whole = FIXED + sum(unit.size for unit in units)
    found = plan(units, whole)
    assert (found.streamed, found.buffers, found.total_bytes) == (frozenset(), 0, whole)


@given(sizes=SIZES, more=st.integers(0, 2000))
def test_what_every_token_needs_stays_before_any_expert(sizes: Sizes, more: int) -> None:
    """While a part that every token needs is streamed that the memory of the resident experts would hold, none is."""
    units = model(sizes)
    found = plan(units, least(units) + more)
    waiting = [unit.size for unit in units if unit.rank is None and unit.name in found.streamed]
    experts = sum(unit.size for unit in units if unit.rank is not None and unit.name in found.resident)
    assert not waiting or experts < min(waiting)


@given(sizes=SIZES, more=st.integers(0, 2000))
def test_layers_stream_alike(sizes: Sizes, more: int) -> None:
    """The number of streamed experts differs by at most one between layers."""
    units = model(sizes)
    found = plan(units, least(units) + more)
    counts = [sum(unit.name in found.streamed for unit in units if unit.layer == layer and unit.rank is not None)
              for layer in range(sizes[0])]
    assert max(counts) - min(counts) <= 1


def test_the_plan_does_not_depend_on_the_order_of_the_units() -> None:
    """Shuffled units give the same plan, and the same order of streaming."""
    units = model((4, 70, 5, 30))
    assert plan(units[::-1], 700) == plan(units, 700)
    assert streaming_order(units[::-1]) == streaming_order(units) == units


def test_more_buffers_than_two_take_an_eighth_of_the_room_at_most() -> None:
    """Six where there is room for them; two, however small their share, where there is not."""
    units = model((8, 10, 16, 10))
    assert [plan(units, FIXED + room).buffers for room in (100, 239, 240, 480, 1000)] == [2, 2, 3, 6, 6]


def test_buffers_give_way_to_a_unit_that_would_not_fit_one() -> None:
    """Two small buffers and all large units resident, where a third buffer would put a large one out."""
    units = model((2, 800, 30, 50))
    found = plan(units, FIXED + 2 * 800 + 2 * 50 + 10)
    assert (found.buffers, found.buffer_bytes, found.resident) == (2, 50, {"0", "1"})
