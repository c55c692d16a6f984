"""Reserve, commit, then advance the status: a pool that refuses leaves rows, slots and pages as they were."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from batchgen_beam.engine.budget import page_budget
from batchgen_beam.engine.executor import Executor
from batchgen_beam.engine.kv_pool import KVPool, PoolExhausted, Reservation
from batchgen_beam.engine.live_rows import LiveRows
from batchgen_beam.engine.sequence import NewTokens, Sequence, Status
from batchgen_beam.engine.slots import SlotTable
from batchgen_beam.records import TokenLogprobs, float_array, token_array
from batchgen_beam.settings import EngineSettings
from tests.engine.rigs import KERNELS, fake_model, prompt


class RefusingPool(KVPool):
    """A pool whose reservation fails at the k-th wish."""

    fail_at: int | None = None

    def reserve(self, wishes: Iterable[tuple[int, int, int]]) -> Reservation:
        """As the pool does, but no page is left for wish number `fail_at`."""
        listed = list(wishes)
        if self.fail_at is not None and self.fail_at < len(listed):
            sequence, computed, _ = listed[self.fail_at]
            listed[self.fail_at] = (sequence, computed, 1 << 20)
        return super().reserve(listed)


@pytest.fixture
def live() -> LiveRows:
    """Four slots over a pool of ten pages on either tier."""
    model = fake_model(layers=1)
    budget = page_budget(model, EngineSettings(dtype="float32", max_rows=4, kv_memory=1 << 20, kv_host_memory=1 << 20))
    pages = dict.fromkeys(budget.device, 11)
    table = SlotTable(4, tuple(budget.device), frozenset(), model.vocab_size)
    return LiveRows(RefusingPool(pages, pages), table, Executor(model, KERNELS, budget))


def rows(count: int) -> list[Sequence]:
    """Queued rows of 70 tokens, two pages each."""
    made = [Sequence(i, prompt(f"{i}", 70), limit=200, content_print="c", numeric_print="n") for i in range(count)]
    for row in made:
        row.advance()
    return made


def decode(live: LiveRows, row: Sequence, tokens: int) -> None:
    """Bring an admitted row to DECODE with so many generated tokens."""
    for count in (1, tokens - 1):
        row.computed_to(row.context if row.status is Status.PREFILL else row.context + count - 1)
        row.absorb(NewTokens(token_array([40] * count), TokenLogprobs(chosen=float_array([0.0] * count))), None)
        live.visit(row)


@pytest.mark.parametrize("failing", range(4))
def test_refused_admission_changes_nothing(live: LiveRows, failing: int) -> None:
    """Where the k-th of four rows finds no page, all four stay queued, without slot or page, for every k."""
    queued = rows(4)
    live.pool.fail_at = failing
    with pytest.raises(PoolExhausted):
        live.admit(queued)
    assert [row.status for row in queued] == [Status.QUEUED] * 4
    assert (live.table.free, live.pool.free, live.rows) == (4, (10,), {})
    live.check_integrity()


def test_refused_extension_changes_nothing(live: LiveRows) -> None:
    """A row whose next page is refused stays as it was and gets it later."""
    [row] = rows(1)
    live.admit([row])
    decode(live, row, 59)
    assert live.views[0].full
    live.pool.fail_at = 0
    with pytest.raises(PoolExhausted):
        live.extend([row])
    assert (row.status, live.pool.held_pages(0), live.views[0].full) == (Status.DECODE, (2,), True)
    live.check_integrity()
    live.pool.fail_at = None
    live.extend([row])
    assert (live.pool.held_pages(0), live.views[0].full) == ((3,), False)


def test_refused_hold_leaves_the_row_running(live: LiveRows) -> None:
    """A row that the host tier has no room for keeps its slot, its pages and its status."""
    first, second = rows(2)
    live.admit([first, second])
    for row in (first, second):
        decode(live, row, 1)
    live.pool._host[live.pool.groups[0]].take(9)
    with pytest.raises(PoolExhausted):
        live.hold(first)
    assert first.status is Status.DECODE
    assert live.slot_of.keys() == {0, 1}
    assert live.pool.held_pages(0) == (2,)
