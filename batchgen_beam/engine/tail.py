"""An engine whose last row may go on in a group of processes.

Owns where the last row is.  What it costs to stay and to move was measured before, the pure tail rule decides, and the
row moves as its continuation record, there and, where other rows come or the group is lost, back: its bits are the same
in either place.  Does not know how the group computes, nor who started it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from batchgen_beam.engine.engine import Engine
from batchgen_beam.engine.round_plan import expected_remaining
from batchgen_beam.engine.stats import EngineStats
from batchgen_beam.engine.tail_rule import Tail, TailChoice, TailCost, TailRule, plan_tail, seconds_left
from batchgen_beam.errors import EngineError
from batchgen_beam.records import Answer, ContinuationRecord, EngineRow

__all__ = ["TailEngine"]

LOG = logging.getLogger(__name__)


def _always() -> bool:
    return True


class TailEngine:
    """`engine` for all rows, and `group` for the last one, which computes the same bits under the same prints.

    `may_refill` says whether rows may still come; until it is given, nothing moves.  An `EngineError` of the group is
    its end, told to `lost`: its row goes on in `engine`, and none moves any more.
    """

    def __init__(self, engine: Engine, group: Engine, cost: TailCost, *, lost: Callable[[], None],
                 rule: TailRule = plan_tail, clock: Callable[[], float] = time.monotonic) -> None:
        self.may_refill: Callable[[], bool] = _always
        self._engine = engine
        self._group = group
        self._cost = cost
        self._tell_lost = lost
        self._rule = rule
        self._clock = clock
        self._is_away = self._is_lost = False
        self._stayed = ""
        self._split_rows = 0
        self._span: tuple[float, float] | None = None

    # In and out

    def submit(self, row: EngineRow) -> None:
        """Queue a row; the one that is away comes back, to be computed in company."""
        if self._span is None:
            self._span = (self._clock(), self._clock())
        self._come_back()
        self._engine.submit(row)

    def poll(self) -> list[Answer]:
        """Answers since the last call."""
        return [*self._engine.poll(), *self._group.poll()]

    def suspend(self, keys: Iterable[str]) -> list[ContinuationRecord]:
        """These rows leave, wherever they are."""
        wanted = set(keys)
        return [*self._engine.suspend(wanted), *self._group.suspend(wanted)]

    def suspend_all(self) -> list[ContinuationRecord]:
        """All rows leave."""
        return [*self._engine.suspend_all(), *self._group.suspend_all()]

    def checkpoint(self, seconds: float) -> list[ContinuationRecord]:
        """Records that are due."""
        return [*self._engine.checkpoint(seconds), *self._group.checkpoint(seconds)]

    # The loop

    def step(self) -> bool:
        """One step where the rows are; False when there is nothing to do."""
        if not (self._is_away or self._is_lost):
            self._consider()
        stepped = (self._is_away and self._step_away()) or self._engine.step()
        if stepped and self._span is not None:
            self._span = (self._span[0], self._clock())
        return stepped

    def _consider(self) -> None:
        """Let the last row go to the group if the rule says so."""
        found = self._engine.last_row()
        if found is None:
            return
        row, context = found
        tail = Tail(rows=1, context=context, may_refill=self.may_refill(), tokens=expected_remaining(
            prompt=len(row.prompt_ids), generated=context - len(row.prompt_ids), max_tokens=row.params.max_tokens,
            context_limit=row.limit))
        choice = self._rule(tail, self._cost)
        if choice is TailChoice.SPLIT or not (tail.may_refill or row.key.text == self._stayed):
            LOG.info("last row %s: %d tokens so far, %d expected, %.3g s here or %.3g s in the group: %s", row.key.uuid,
                     context, tail.tokens, seconds_left(tail, self._cost, TailChoice.STAY),
                     seconds_left(tail, self._cost, TailChoice.SPLIT), choice)
            self._stayed = row.key.text
        if choice is TailChoice.SPLIT:
            self._go()

    def _go(self) -> None:
        for record in self._engine.suspend_all():
            self._group.submit(record)
            self._split_rows += 1
        self._is_away = True

    def _come_back(self) -> None:
        if self._is_away:
            self._is_away = False
            for record in self._group.suspend_all():
                self._engine.submit(record)

    def _step_away(self) -> bool:
        """A step of the group; False if its row has ended or is here again."""
        try:
            self._is_away = self._group.step()
        except EngineError as error:
            LOG.warning("the tail's processes are lost, its row goes on in this one: %s", error)
            self._come_back()
            self._is_lost = True
            self._tell_lost()
        return self._is_away

    # What there is

    def stats(self) -> EngineStats:
        """Of both; pages and slots are the engine's."""
        group = self._group.stats()
        first, last = self._span or (0.0, 0.0)
        return replace(self._engine.stats().with_work_of(group), span_seconds=last - first,
                       split_rows=self._split_rows, split_tokens=group.generated_tokens)
