"""The schedule is a pure function: its laws on hand-made snapshots, without models or pages."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen_beam.engine.paging import pages_of
from batchgen_beam.engine.scheduler import RowView, Snapshot, schedule
from batchgen_beam.engine.sequence import Status
from batchgen_beam.models.caches import CacheKind, GroupKey

PAGED = GroupKey(CacheKind.PAGED)


def view(seq_id: int, status: Status, tokens: int, *, full: bool = False, computed: int | None = None) -> RowView:
    """A row that owns the pages which its status implies."""
    stored = 0 if status in (Status.QUEUED, Status.EVICTED) else tokens - 1
    pages = 0 if status in (Status.QUEUED, Status.EVICTED) else pages_of(tokens - full)
    return RowView(seq_id=seq_id, status=status, tokens=tokens, computed=stored if computed is None else computed,
                   pages=(pages,), full=full)


def snapshot(rows: list[RowView], queue: list[RowView] | None = None, *, free: int = 0, host: int = 0, slots: int = 8,
             step_tokens: int = 256, chunk: int = 64) -> Snapshot:
    """One paged group."""
    return Snapshot(rows=tuple(rows), queue=tuple(queue or ()), groups=(PAGED,), free=(free,), free_host=(host,),
                    free_slots=slots, step_tokens=step_tokens, prefill_chunk=chunk)


def test_full_row_takes_a_free_page() -> None:
    """A row whose page is full is extended and nobody else is disturbed."""
    plan = schedule(snapshot([view(0, Status.DECODE, 65, full=True), view(1, Status.DECODE, 30)], free=1))
    assert plan.extend == (0,)
    assert (plan.hold, plan.evict) == ((), ())


def test_youngest_gives_way_and_is_held_only_where_the_host_has_room() -> None:
    """Without a free page the youngest row is held, or evicted if the host tier is full or off."""
    rows = [view(0, Status.DECODE, 65, full=True), view(1, Status.DECODE, 90), view(2, Status.DECODE, 90)]
    assert schedule(snapshot(rows, host=2)).hold == (2,)
    assert schedule(snapshot(rows, host=1)).evict == (2,)
    assert schedule(snapshot(rows)).evict == (2,)


def test_prefilling_row_is_evicted_never_held() -> None:
    """HELD is a rest for decoding rows only."""
    rows = [view(0, Status.DECODE, 65, full=True), view(1, Status.PREFILL, 90, computed=64)]
    assert schedule(snapshot(rows, host=9)).evict == (1,)


def test_oldest_row_is_never_evicted() -> None:
    """Even where every row wants a page and none is free, the oldest gets one and stays."""
    plan = schedule(snapshot([view(i, Status.DECODE, 65, full=True) for i in range(6)]))
    assert plan.extend[0] == 0
    assert 0 not in plan.evict


def test_preempting_stops_admission_in_that_step() -> None:
    """A page that a victim just freed is not given to a newcomer."""
    rows = [view(0, Status.DECODE, 65, full=True), view(1, Status.DECODE, 190)]
    assert schedule(snapshot(rows, [view(2, Status.QUEUED, 10)])).admit == ()


def test_admission_leaves_one_free_page_for_each_running_row() -> None:
    """A newcomer is admitted only if every running row can still fill another page."""
    rows = [view(0, Status.DECODE, 30), view(1, Status.DECODE, 30)]
    queue = [view(2, Status.QUEUED, 10)]
    assert schedule(snapshot(rows, queue, free=2)).admit == ()
    assert schedule(snapshot(rows, queue, free=3)).admit == (2,)


def test_row_above_the_watermark_runs_alone() -> None:
    """Case B1: a row that fits the pool only alone is admitted when nothing else runs."""
    queue = [view(0, Status.QUEUED, 640), view(1, Status.QUEUED, 10)]
    assert schedule(snapshot([], queue, free=10)).admit == (0,)


def test_returning_rows_go_before_new_ones_by_age() -> None:
    """Held and evicted rows come back oldest first; while one waits, nothing new is admitted."""
    rows = [view(3, Status.HELD, 100), view(1, Status.EVICTED, 100), view(2, Status.EVICTED, 600)]
    plan = schedule(snapshot(rows, [view(9, Status.QUEUED, 5)], free=6))
    assert (plan.restore, plan.admit) == ((), (1,))
    plan = schedule(snapshot(rows[:2], [view(9, Status.QUEUED, 5)], free=9))
    assert (plan.restore, plan.admit) == ((3,), (1, 9))


def test_prompt_tokens_fill_what_decoding_leaves() -> None:
    """Decode rows count one token each; chunks are cut to the rest of the step, oldest first."""
    rows = [view(0, Status.DECODE, 30), view(1, Status.PREFILL, 100, computed=0),
            view(2, Status.PREFILL, 100, computed=36)]
    plan = schedule(snapshot(rows, step_tokens=101, free=9))
    assert [(c.seq_id, c.start, c.count) for c in plan.prefill] == [(1, 0, 64), (2, 36, 36)]
    plan = schedule(snapshot(rows, step_tokens=101, chunk=0, free=9))
    assert [(c.seq_id, c.count) for c in plan.prefill] == [(1, 100)]


def test_prefill_never_starves() -> None:
    """However many rows decode, a quarter of the step stays for prompts."""
    rows = [view(i, Status.DECODE, 30) for i in range(40)] + [view(40, Status.PREFILL, 100, computed=0)]
    assert schedule(snapshot(rows, step_tokens=40, free=99)).prefill[0].count == 10


ROWS = st.lists(st.tuples(st.sampled_from([Status.DECODE, Status.PREFILL, Status.HELD, Status.EVICTED]),
                          st.integers(2, 400), st.booleans()), max_size=12)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(ROWS, st.integers(0, 30), st.integers(0, 10), st.integers(0, 6), st.randoms(use_true_random=False))
def test_decision_is_pure_and_independent_of_order(rows: list[tuple[Status, int, bool]], free: int, host: int,
                                                   queued: int, shuffle: random.Random) -> None:
    """Case B11: the same rows in any order give the same plan, twice, and no row is in two lists."""
    views = [view(i, status, tokens, full=full and status is Status.DECODE,
                  computed=0 if status is Status.PREFILL else None)
             for i, (status, tokens, full) in enumerate(rows)]
    state = snapshot(views, [view(100 + i, Status.QUEUED, 50) for i in range(queued)], free=free, host=host)
    plan = schedule(state)
    mixed = list(views)
    shuffle.shuffle(mixed)
    assert schedule(replace(state, rows=tuple(mixed))) == plan
    moved = [*plan.hold, *plan.evict, *plan.extend, *plan.restore, *plan.admit]
    assert len(moved) == len(set(moved))
    assert not set(plan.evict) & {chunk.seq_id for chunk in plan.prefill}


@pytest.mark.parametrize("status", [Status.HELD, Status.EVICTED])
def test_returning_row_needs_its_pages_and_the_next(status: Status) -> None:
    """A row held at the end of its page comes back only with room for the page that it wants."""
    row = view(0, status, 129)
    assert schedule(snapshot([row], free=2)).restore + schedule(snapshot([row], free=2)).admit == ()
    plan = schedule(snapshot([row], free=3))
    assert plan.restore + plan.admit == (0,)
