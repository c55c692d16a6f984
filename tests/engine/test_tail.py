"""Laws of an engine whose last row may go elsewhere: who goes, who comes back, and that nothing is lost or changed.

The group is an engine of this process on the same model, so that its every step is in the test's hands.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from batchgen_beam.engine.batch import PackedBatch
from batchgen_beam.engine.engine import Engine
from batchgen_beam.engine.executor import Executor
from batchgen_beam.engine.tail import TailEngine
from batchgen_beam.engine.tail_rule import Tail, TailChoice, TailCost
from batchgen_beam.errors import EngineError
from batchgen_beam.models.interface import Scores
from batchgen_beam.records import Answer
from batchgen_beam.settings import EngineSettings
from tests.engine.rigs import FACTS, KERNELS, engine, fake_model, prompt, run, said

FREE = TailCost(here=1.0, split=0.0, prefill=0.0)
PROMPTS = [prompt(f"row-{i}", 30 + i, max_tokens=(5, 90, 7)[i]) for i in range(3)]
"""The second is the last."""


class Failing(Executor):
    """Its `fail`-th pass ends like one of a group that has lost a process."""

    fail = 0

    def forward(self, batch: PackedBatch, whole_W: NDArray[np.bool_], eligible: int) -> Scores:
        """A pass, or the end."""
        if self.fail and self.forward_calls + 1 >= self.fail:
            raise EngineError("process 1 of the partition's 2 ended")
        return super().forward(batch, whole_W, eligible)


class Rig:
    """A `TailEngine` over fake models; a group that costs nothing, unless it fails."""

    def __init__(self, *, fail: int = 0, more: Callable[[], bool] = lambda: False) -> None:
        self.group = Engine(fake_model(), KERNELS, EngineSettings(dtype="float32", max_rows=1, kv_memory=1 << 20),
                            FACTS, make_executor=type("Failing", (Failing,), {"fail": fail}))
        self.losses = 0
        self.tail = TailEngine(engine(), self.group, FREE, lost=self.lose, clock=self.tick)
        self.tail.may_refill = more
        self.answers: dict[str, Answer] = {}
        self.ticks = 0

    def lose(self) -> None:
        """The group is told to end."""
        self.losses += 1

    def tick(self) -> float:
        """A clock that goes on by 1 with each look."""
        self.ticks += 1
        return float(self.ticks)

    def steps(self, until: Callable[[], bool] = lambda: False) -> None:
        """Step until something holds, or to the end."""
        while not until() and self.tail.step():
            self.answers |= {answer.key.uuid: answer for answer in self.tail.poll()}
            self.group.check_integrity()

    def away(self) -> bool:
        """Whether a row is with the group."""
        return self.group.stats().active > 0


@pytest.fixture(scope="module")
def expected() -> dict[str, tuple[object, ...]]:
    """The rows in one engine."""
    return said(run(engine(), PROMPTS))


def test_the_last_row_goes_and_its_sums_are_one(expected: dict[str, tuple[object, ...]]) -> None:
    """Nothing goes while there is company; then the last row ends in the group, its bits the same.  Every token and
    row is counted once, and the time of both engines is one span."""
    rig = Rig()
    for one in PROMPTS:
        rig.tail.submit(one)
    rig.steps(rig.away)
    assert set(rig.answers) == {"row-0", "row-2"}
    rig.steps()
    assert said(rig.answers) == expected
    stats = rig.tail.stats()
    assert (stats.split_rows, stats.rows_done, stats.capacity) == (1, 3, 8)
    assert 70 < stats.split_tokens < 90
    assert stats.generated_tokens == sum(len(bits[0]) for bits in expected.values())  # type: ignore[arg-type]
    assert stats.span_seconds == rig.ticks - 1
    assert stats.active == stats.queued == stats.waiting == stats.pages_used == 0


def test_nothing_goes_while_rows_may_come(expected: dict[str, tuple[object, ...]]) -> None:
    """A lane that still feeds keeps the last row where company will find it."""
    rig = Rig(more=lambda: True)
    for one in PROMPTS:
        rig.tail.submit(one)
    rig.steps()
    assert (said(rig.answers), rig.tail.stats().split_rows) == (expected, 0)


def test_a_row_comes_back_to_company(expected: dict[str, tuple[object, ...]]) -> None:
    """Rows that come while one is away bring it back; the last of them goes again."""
    rig = Rig()
    rig.tail.submit(PROMPTS[1])
    rig.steps(rig.away)
    for one in (PROMPTS[0], PROMPTS[2]):
        rig.tail.submit(one)
        assert not rig.away()
    rig.steps()
    assert (said(rig.answers), rig.tail.stats().split_rows) == (expected, 2)


@pytest.mark.parametrize("fail", [1, 2, 30])
def test_a_lost_group_loses_no_row(fail: int, expected: dict[str, tuple[object, ...]]) -> None:
    """Whichever of the group's passes fails, its row goes on here with what it has said; no other row goes there."""
    rig = Rig(fail=fail)
    for one in PROMPTS:
        rig.tail.submit(one)
    rig.steps()
    assert said(rig.answers) == expected
    assert (rig.losses, rig.tail.stats().split_rows, rig.tail.stats().split_tokens) == (1, 1, fail - 1)
    rig.answers.clear()
    rig.tail.submit(PROMPTS[1])
    rig.steps()
    assert said(rig.answers) == {"row-1": expected["row-1"]}
    assert (rig.losses, rig.tail.stats().split_rows) == (1, 1)


def test_a_row_that_is_away_is_recorded_and_leaves(expected: dict[str, tuple[object, ...]]) -> None:
    """Checkpoints and suspensions reach it, and its record goes on in another engine with the same bits."""
    rig = Rig()
    rig.tail.submit(PROMPTS[1])
    rig.steps(lambda: rig.group.stats().generated_tokens == 20)
    (kept,) = rig.tail.checkpoint(0.0)
    (record,) = rig.tail.suspend([PROMPTS[1].key.text])
    assert len(record.generated_ids) == len(kept.generated_ids) > 20
    assert not rig.tail.step()
    assert rig.tail.suspend_all() == []
    assert said(run(engine(), [record])) == {"row-1": expected["row-1"]}  # type: ignore[list-item]


def test_the_rule_is_told_what_is_left() -> None:
    """One row, its context, and what it may still say at most."""
    seen: list[Tail] = []

    def rule(tail: Tail, cost: TailCost) -> TailChoice:
        assert cost is FREE
        seen.append(tail)
        return TailChoice.STAY

    rig = Rig()
    rig.tail = TailEngine(engine(), rig.group, FREE, lost=rig.lose, rule=rule)
    rig.tail.submit(PROMPTS[1])
    rig.steps()
    assert [tail.context for tail in seen] == list(range(32, 121))
    assert all(tail.rows == 1 and tail.may_refill and 1 <= tail.tokens <= 121 - tail.context for tail in seen)
