"""The page pool: all or nothing, nothing owned before commit, every page accounted for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen_beam.engine.kv_pool import KVPool, PoolExhausted
from batchgen_beam.models.caches import CacheKind, GroupKey

PAGED = GroupKey(CacheKind.PAGED)
WINDOWED = GroupKey(CacheKind.WINDOWED, 100)
STATE = GroupKey(CacheKind.STATE)


def pool(pages: int, host: int = 0) -> KVPool:
    """One paged group; counts are of usable pages."""
    return KVPool({PAGED: pages + 1}, {PAGED: host + 1})


def own(rig: KVPool, sequence: int, tokens: int) -> None:
    """Reserve and commit the pages of a context."""
    rig.commit(rig.reserve([(sequence, 0, tokens)]))


@pytest.mark.parametrize("failing", range(4))
def test_failing_row_rolls_back_everything(failing: int) -> None:
    """Case B3: where the allocator fails at the k-th row, no page is taken, for every k, and no row owns any."""
    sizes = [64, 128, 64, 128]
    fits = sum(-(-size // 64) for size in sizes[:failing])
    rig = pool(fits)
    with pytest.raises(PoolExhausted):
        rig.reserve((row, 0, size) for row, size in enumerate(sizes))
    assert rig.free == (fits,)
    assert [rig.held_pages(row) for row in range(4)] == [(0,)] * 4
    rig.check_integrity()


def test_reserved_pages_belong_to_nobody_until_committed() -> None:
    """A reservation can be cancelled without a trace."""
    rig = pool(4)
    reservation = rig.reserve([(7, 0, 130)])
    assert rig.free == (1,)
    assert rig.held_pages(7) == (0,)
    rig.cancel(reservation)
    rig.check_integrity()
    assert rig.free == (4,)


def test_page_zero_is_never_handed_out() -> None:
    """Page 0 is the zero page of every table."""
    rig = pool(5)
    own(rig, 1, 5 * 64)
    assert 0 not in rig.table(1, PAGED)[1]


def test_extension_reserves_only_what_is_missing() -> None:
    """A sequence that grows by one page gets one page."""
    rig = pool(5)
    own(rig, 1, 64)
    rig.commit(rig.reserve([(1, 64, 65)]))
    assert rig.held_pages(1) == (2,)
    assert rig.reserve([(1, 70, 71)]).pages == ()


def test_hold_and_restore_move_all_pages_and_free_the_other_tier() -> None:
    """HELD keeps pages on the host tier only; restoring brings as many back, and copies name both ends."""
    rig = pool(3, host=3)
    own(rig, 1, 130)
    source = list(rig.table(1, PAGED)[1])
    copies = rig.hold(1)
    assert [copy.source for copy in copies] == source
    assert rig.free == (3,)
    assert rig.free_host == (0,)
    own(rig, 2, 64)
    with pytest.raises(PoolExhausted):
        rig.restore(1)
    rig.release(2)
    assert len(rig.restore(1)) == 3
    rig.check_integrity()
    rig.release(1)
    assert (rig.free, rig.free_host) == ((3,), (3,))


def test_windowed_group_frees_pages_behind_the_window() -> None:
    """A page that no later query can see is freed, one that any can see is kept."""
    rig = KVPool({WINDOWED: 11})
    own(rig, 1, 300)
    assert rig.held_pages(1) == (5,)
    rig.trim(1, 162)  # the query at 162 sees keys from 63 on
    assert rig.held_pages(1) == (5,)
    rig.trim(1, 163)  # from 64 on
    assert rig.table(1, WINDOWED)[0] == 1
    assert rig.held_pages(1) == (4,)
    rig.check_integrity()


def test_state_group_has_one_slot_per_sequence() -> None:
    """A recurrent layer's memory does not grow with the context."""
    rig = KVPool({STATE: 3})
    own(rig, 1, 10)
    rig.commit(rig.reserve([(1, 10, 1000)]))
    assert rig.held_pages(1) == (1,)
    assert rig.capacity(1) is None


ACTIONS = st.lists(st.tuples(st.sampled_from(["grow", "hold", "restore", "release", "trim", "cancel"]),
                             st.integers(0, 4), st.integers(1, 400)), max_size=40)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(ACTIONS)
def test_any_history_keeps_integrity(history: list[tuple[str, int, int]]) -> None:
    """After any series of calls each page is free or owned once, and all return when all sequences leave."""
    rig = KVPool({PAGED: 12, WINDOWED: 9, STATE: 4}, {PAGED: 6, WINDOWED: 6, STATE: 3})
    on_device: dict[int, int] = {}
    held: dict[int, int] = {}
    for action, sequence, tokens in history:
        try:
            if action == "grow" and sequence not in held:
                computed = on_device.get(sequence, 0)
                rig.commit(rig.reserve([(sequence, computed, max(tokens, computed + 1))]))
                on_device[sequence] = max(tokens, computed + 1)
            elif action == "cancel" and sequence not in held:
                rig.cancel(rig.reserve([(sequence, on_device.get(sequence, 0), tokens)]))
            elif action == "trim" and sequence in on_device:
                rig.trim(sequence, on_device[sequence])
            elif action == "hold" and sequence in on_device:
                rig.hold(sequence)
                held[sequence] = on_device.pop(sequence)
            elif action == "restore" and sequence in held:
                rig.restore(sequence)
                on_device[sequence] = held.pop(sequence)
            elif action == "release":
                rig.release(sequence)
                on_device.pop(sequence, None)
                held.pop(sequence, None)
        except PoolExhausted:
            pass
        rig.check_integrity()
    for sequence in range(5):
        rig.release(sequence)
    rig.check_integrity()
    assert rig.free == rig.usable
