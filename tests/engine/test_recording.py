"""What outlives an engine: records of running rows, rows that leave, rows that must run alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from batchgen_beam.engine.driver import Driver
from batchgen_beam.engine.engine import Engine
from batchgen_beam.engine.scheduler import Plan, Snapshot, schedule
from batchgen_beam.records import Answer, ContinuationRecord, EngineRow, Outcome, Prompt
from tests.engine.rigs import engine, finish, prompt, run, said

pytestmark = pytest.mark.timeout(60)

ROWS = [prompt(f"row-{i}", 3 + 11 * i, max_tokens=150 + i, logprobs=2, seed=i,
               temperature=0.0 if i % 2 else 1.0) for i in range(6)]


@dataclass
class Notes:
    """A recorder that remembers what it was told."""

    checkpoint_seconds: float = float("inf")
    lonely: frozenset[str] = frozenset()
    inside: list[frozenset[str]] = field(default_factory=list)
    answers: list[tuple[EngineRow, Answer]] = field(default_factory=list)
    records: list[ContinuationRecord] = field(default_factory=list)

    def alone(self, row: EngineRow) -> bool:
        """By id."""
        return row.key.uuid in self.lonely

    def entering(self, rows: Collection[EngineRow]) -> None:
        """Their ids."""
        self.inside.append(frozenset(row.key.uuid for row in rows))

    def answered(self, answers: Sequence[tuple[EngineRow, Answer]]) -> None:
        """See the class."""
        self.answers += answers

    def recorded(self, records: Sequence[ContinuationRecord]) -> None:
        """See the class."""
        self.records += records


@contextmanager
def driver(rig: Engine, notes: Notes) -> Iterator[Driver]:
    """A driver that is ended afterwards."""
    one = Driver(rig, notes)
    try:
        yield one
    finally:
        one.close(timeout=20)


def drain(rig: Driver, lane: str) -> dict[str, Answer]:
    """Take until the lane has nothing pending."""
    answers: dict[str, Answer] = {}
    while rig.pending(lane):
        answers |= {answer.key.uuid: answer for answer in rig.take(lane, timeout=10)}
    return answers


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, tuple[object, ...]]:
    """The bits of all rows in one engine."""
    return said(run(engine(), ROWS))


@pytest.mark.parametrize("steps", [1, 7, 64, 65, 100])
def test_a_row_moved_three_times_keeps_its_bits(undisturbed: dict[str, tuple[object, ...]], steps: int) -> None:
    """Greedy and sampled rows that move to a fresh engine 1, 2 and 3 times, also in mid-page, answer the same bits."""
    answers: dict[str, Answer] = {}
    waiting: list[EngineRow] = list(ROWS)
    for _ in range(3):
        rig = engine()
        for row in waiting:
            rig.submit(row)
        for _ in range(steps):
            rig.step()
        answers |= {answer.key.uuid: answer for answer in rig.poll()}
        waiting = [ContinuationRecord.from_bytes(record.to_bytes()) for record in rig.suspend_all()]
    last = engine()
    for row in waiting:
        last.submit(row)
    answers |= finish(last)
    assert said(answers) == undisturbed
    assert last.stats().resumed_rows == sum(bool(row.generated_ids) for row in waiting if not isinstance(row, Prompt))


def test_resumed_tokens_are_what_the_engine_before_had_computed() -> None:
    """A resumed row's context is prefilled once: prompt and generated, less the last token, counted as resumed."""
    rig = engine()
    rig.submit(prompt("row", 100, max_tokens=80))
    for _ in range(40):
        rig.step()
    (record,) = rig.suspend_all()
    fresh = engine()
    fresh.submit(record)
    finish(fresh)
    stats = fresh.stats()
    assert stats.resumed_tokens == 100 + len(record.generated_ids) - 1 == stats.recomputed_tokens
    assert stats.generated_tokens == 80 - len(record.generated_ids)


def test_records_of_another_print_start_over_and_are_counted() -> None:
    """A record made under another print is not gone on with: its row starts from the prompt, counted by reason."""
    rig = engine()
    rig.submit(ROWS[0])
    for _ in range(30):
        rig.step()
    (record,) = rig.suspend_all()
    fresh = engine()
    for name in ("numeric_print", "content_print"):
        foreign = ContinuationRecord(**{n: getattr(record, n) for n in record.__slots__} | {name: "other"})
        fresh.submit(foreign)
        assert said(finish(fresh)) == said(run(engine(), ROWS[:1]))
    assert fresh.stats().restarts == {"numeric_print": 1, "content_print": 1}
    assert fresh.stats().resumed_rows == 0


def test_checkpoints_come_with_growth_and_time_and_hold_the_bits() -> None:
    """A running row is recorded anew once the time is over and its answer has grown by a quarter; any record serves."""
    now = [0.0]
    rig = engine(clock=lambda: now[0])
    rig.submit(prompt("row", 20, max_tokens=200))
    lengths = []
    records: list[ContinuationRecord] = []
    while rig.step():
        now[0] += 1.0
        fresh = rig.checkpoint(10.0)
        records += fresh
        lengths += [(now[0], len(record.generated_ids)) for record in fresh]
    (answer,) = rig.poll()
    assert lengths[0][1] > 0
    for (before, shorter), (after, longer) in pairwise(lengths):
        assert after - before >= 10
        assert longer > 1.25 * shorter
    assert not rig.checkpoint(0.0)
    for record in records:
        fresh_rig = engine()
        fresh_rig.submit(record)
        assert said(finish(fresh_rig)) == said({"row": answer})


def test_the_recorder_hears_of_every_row_and_answer() -> None:
    """Rows are told before the engine has them, answers once each with their row."""
    notes = Notes()
    with driver(engine(), notes) as rig:
        rig.open_lane("a", ROWS[:3])
        rig.open_lane("b", ROWS[2:])
        answers = drain(rig, "a") | drain(rig, "b")
    assert sorted(row.key.uuid for row, _ in notes.answers) == sorted(answers)
    assert all(row.key == answer.key for row, answer in notes.answers)
    assert frozenset().union(*notes.inside) == answers.keys()


def test_rows_that_wait_for_a_slot_are_not_inside() -> None:
    """A process that dies is told against the rows that it may have run, not against all that it was given."""
    rows = [prompt(f"{i}", 4, max_tokens=1 + i % 5) for i in range(40)]
    notes = Notes()
    with driver(engine(max_rows=4), notes) as rig:
        rig.open_lane("lane", rows)
        assert len(drain(rig, "lane")) == 40
    assert max(map(len, notes.inside)) == 4
    assert frozenset().union(*notes.inside) == {row.key.uuid for row in rows}


def test_a_slow_recorder_is_told_of_several_rows_at_once() -> None:
    """A quarter of the slots may then wait in the engine, and no slot is empty while a row is there."""
    ticks = iter(range(1_000_000))
    rows = [prompt(f"{i}", 4, max_tokens=1 + i % 5) for i in range(60)]
    quick, slow = Notes(), Notes()
    for notes, clock in ((quick, lambda: 0.0), (slow, lambda: float(next(ticks)))):
        rig = Driver(engine(max_rows=8), notes, clock=clock)
        rig.open_lane("lane", rows)
        assert len(drain(rig, "lane")) == 60
        rig.close(timeout=20)
    assert max(map(len, slow.inside)) == 10
    assert len(slow.inside) < len(quick.inside)


def test_a_lane_suspended_leaves_the_others(undisturbed: dict[str, tuple[object, ...]]) -> None:
    """The rows of a suspended lane leave as records or are answered, none twice; those of other lanes go on.

    A row that both lanes asked for stays, and both get its answer.
    """
    notes = Notes()
    with driver(engine(max_rows=4), notes) as rig:
        rig.open_lane("a", ROWS[:4])
        rig.open_lane("b", ROWS[3:])
        early = {answer.key.uuid: answer for answer in rig.take("b", timeout=0.2)}
        records = rig.suspend("a")
        answers = drain(rig, "a")
        assert {record.key.uuid for record in records}.isdisjoint(answers)
        assert {record.key.uuid for record in records} | answers.keys() == {row.key.uuid for row in ROWS[:4]}
        assert ROWS[3].key.uuid in answers
        assert rig.unanswered() <= 2
        others = early | drain(rig, "b")
        assert others[ROWS[3].key.uuid] is answers[ROWS[3].key.uuid]
        answers |= others
    assert all(record in records for record in notes.records)
    second = engine()
    for record in records:
        second.submit(record)
    assert said(answers | finish(second)) == undisturbed


def test_nothing_is_lost_whenever_a_lane_is_suspended() -> None:
    """Wherever in the engine's life a lane is suspended, each of its rows is an answer or a record."""
    rows = [prompt(f"{i}", 4, max_tokens=1 + i % 5) for i in range(40)]
    for pause in range(12):
        with driver(engine(max_rows=4), Notes()) as rig:
            rig.open_lane("lane", rows)
            taken = [answer.key.uuid for _ in range(pause) for answer in rig.take("lane", timeout=0.01)]
            left = [record.key.uuid for record in rig.suspend("lane")]
            taken += drain(rig, "lane")
            assert sorted(taken + left) == sorted(row.key.uuid for row in rows)
            assert rig.unanswered() == 0
            rig.open_lane("lane", rows[:3])
            assert len(drain(rig, "lane")) == 3


def test_closing_with_suspend_records_what_runs(undisturbed: dict[str, tuple[object, ...]]) -> None:
    """A driver that has to go records every row that has begun; going on from there gives the same bits."""
    notes = Notes()
    with driver(engine(), notes) as rig:
        rig.open_lane("lane", ROWS)
        while not rig.stats().generated_tokens > 100:
            rig.take("lane", timeout=0.01)
        rig.close(suspend=True, timeout=20)
    begun = {record.key.uuid for record in notes.records}
    assert begun
    assert all(record.generated_ids for record in notes.records)
    second = engine()
    for record in notes.records:
        second.submit(record)
    told = {row.key.uuid: answer for row, answer in notes.answers}
    rest = [row for row in ROWS if row.key.uuid not in begun | told.keys()]
    assert said(told | run(second, rest)) == undisturbed


def test_lonely_rows_run_alone() -> None:
    """A row that may only run alone is in the engine by itself, and all rows are answered."""
    lonely = frozenset({"row-1", "row-4"})
    seen: list[int] = []

    def watch(snapshot: Snapshot) -> Plan:
        seen.append(len(snapshot.rows) + len(snapshot.queue))
        return schedule(snapshot)

    notes = Notes(lonely=lonely)
    with driver(engine(schedule=watch), notes) as rig:
        rig.open_lane("a", ROWS[:3])
        rig.open_lane("b", ROWS[3:])
        answers = drain(rig, "a")
        rig.submit("b", [prompt("late", 5)])
        answers |= drain(rig, "b")
    assert answers.keys() == {row.key.uuid for row in ROWS} | {"late"}
    assert all(isinstance(answer, Outcome) for answer in answers.values())
    for inside in notes.inside:
        assert len(inside) == 1 or not inside & lonely, inside
    assert lonely <= frozenset().union(*notes.inside)
    assert max(seen) > 1


def test_steps_are_fed_while_a_lane_may_submit() -> None:
    """Steps count as fed until every lane has said that it has no more rows."""
    with driver(engine(), Notes()) as rig:
        rig.open_lane("a", ROWS[:2])
        rig.open_lane("b", ROWS[2:4])
        drain(rig, "a")
        drain(rig, "b")
        stats = rig.stats()
        assert stats.fed_steps == stats.steps > 0
        assert stats.fed_row_steps == stats.row_steps
        assert stats.lanes_peak == 2
        rig.fed("a")
        rig.fed("b")
        rig.submit("a", [prompt("more", 5)])
        drain(rig, "a")
        assert rig.stats().fed_steps == stats.fed_steps < rig.stats().steps
