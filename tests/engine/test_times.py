"""The engine's times by a clock that stands still outside the model: busy seconds are always within the span."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from batchgen_beam.engine.engine import Engine
from batchgen_beam.models.interface import BatchView, Scores
from tests.engine.rigs import engine, fake_model, finish, prompt

PASS_SECONDS = 2.0


@dataclass
class Clock:
    """Seconds that the test moves."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def timed(clock: Clock) -> Engine:
    """An engine whose forward passes take `PASS_SECONDS` and whose other work takes none."""
    model = fake_model()
    forward = model.forward

    def slow(view: BatchView) -> Scores:
        clock.now += PASS_SECONDS
        return forward(view)

    model.forward = slow
    return engine(model, clock=clock)


def times(rig: Engine) -> tuple[float, float]:
    """Busy seconds and the span."""
    stats = rig.stats()
    return stats.busy_seconds, stats.span_seconds


def test_the_span_begins_with_the_first_row_and_ends_with_the_last_step() -> None:
    """Waiting before the first row and after the last step is no part of it, waiting between is."""
    clock = Clock()
    rig = timed(clock)
    clock.now += 50
    rig.submit(prompt("a", 10, max_tokens=3))
    clock.now += 5
    finish(rig)
    assert times(rig) == (6.0, 11.0)
    clock.now += 7
    rig.submit(prompt("b", 10, max_tokens=2))
    finish(rig)
    clock.now += 1000
    assert not rig.step()
    assert times(rig) == (10.0, 22.0)


@pytest.mark.parametrize("taken", [True, False])
def test_answers_that_nobody_takes_change_no_time(taken: bool) -> None:
    """Whether they are polled or not, and a row that fails before it is queued counts neither way."""
    clock = Clock()
    rig = timed(clock)
    rig.submit(prompt("too long", 5000))
    clock.now += 3
    rig.submit(prompt("short", 10, max_tokens=1))
    rig.submit(prompt("long", 10, max_tokens=6))
    while rig.step():
        if taken:
            rig.poll()
    assert times(rig) == (12.0, 12.0)


def test_steps_of_rows_that_leave_are_in_both() -> None:
    """A row that is moved before its answer took time here, and takes time where it goes on; none is in one only."""
    clock = Clock()
    rig = timed(clock)
    rig.submit(prompt("stays", 10, max_tokens=2))
    rig.submit(prompt("leaves", 10, max_tokens=50))
    clock.now += 1
    for _ in range(20):
        rig.step()
    assert [answer.key.uuid for answer in rig.poll()] == ["stays"]
    (record,) = rig.suspend_all()
    clock.now += 30
    assert not rig.step()
    assert times(rig) == (40.0, 41.0)
    other = timed(clock)
    other.submit(record)
    finish(other)
    steps = other.stats().steps
    assert steps >= 30
    assert times(other) == (PASS_SECONDS * steps, PASS_SECONDS * steps)


def test_an_engine_without_an_answer_has_a_span() -> None:
    """All its rows have moved: what it took them is known."""
    clock = Clock()
    rig = timed(clock)
    assert times(rig) == (0.0, 0.0)
    rig.submit(prompt("leaves", 10, max_tokens=50))
    for _ in range(4):
        rig.step()
    rig.suspend_all()
    assert times(rig) == (8.0, 8.0)
