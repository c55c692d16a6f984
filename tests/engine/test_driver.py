"""The driver: one thread steps the engine; lanes wait, share, are abandoned, and learn of a death."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from batchgen_beam.engine.driver import Driver
from batchgen_beam.engine.scheduler import Plan, Snapshot, schedule
from batchgen_beam.errors import EngineError
from batchgen_beam.records import Answer, Outcome, Prompt
from tests.engine.rigs import engine, prompt, run, said

pytestmark = pytest.mark.timeout(60)


@contextmanager
def driver(plan: Callable[[Snapshot], Plan] = schedule, **settings: int) -> Iterator[Driver]:
    """A driver over the paged fake model, ended afterwards."""
    rig = Driver(engine(schedule=plan, **settings))
    try:
        yield rig
    finally:
        rig.close(timeout=20)


def drain(rig: Driver, lane: str) -> list[Answer]:
    """Take until the lane has nothing pending."""
    answers: list[Answer] = []
    while rig.pending(lane):
        answers += rig.take(lane, timeout=10)
    return answers


def rows(lane: str, count: int, **params: int) -> list[Prompt]:
    """Prompts of one lane."""
    return [prompt(f"{lane}-{i}", 5 + i, **{"max_tokens": 20, **params}) for i in range(count)]


def names(answers: list[Answer]) -> list[str]:
    """Sorted ids."""
    return sorted(answer.key.uuid for answer in answers)


def test_error_of_the_driver_reaches_every_waiter_with_its_cause() -> None:
    """If stepping fails, every waiter and every later caller gets an EngineError that carries the cause."""
    release = threading.Event()

    def failing(snapshot: Snapshot) -> Plan:
        release.wait(20)
        raise ZeroDivisionError("planned")

    causes: list[BaseException | None] = []

    def wait(rig: Driver, lane: str) -> None:
        try:
            drain(rig, lane)
        except EngineError as error:
            causes.append(error.__cause__)

    with driver(failing) as rig:
        for lane in "abc":
            rig.open_lane(lane, rows(lane, 2))
        waiters = [threading.Thread(target=wait, args=(rig, lane)) for lane in "abc"]
        for waiter in waiters:
            waiter.start()
        release.set()
        for waiter in waiters:
            waiter.join(20)
        assert [type(cause) for cause in causes] == [ZeroDivisionError] * 3
        with pytest.raises(EngineError, match="planned"):
            rig.submit("a", rows("a", 1))


def test_lane_that_finishes_first_gets_its_own_rows_and_no_others() -> None:
    """A short lane ends while a long one runs on; neither sees the other's answers."""
    with driver() as rig:
        rig.open_lane("long", rows("long", 3, max_tokens=600))
        rig.open_lane("short", rows("short", 3, max_tokens=2))
        assert names(drain(rig, "short")) == ["short-0", "short-1", "short-2"]
        assert rig.pending("long") == 3
        assert names(drain(rig, "long")) == ["long-0", "long-1", "long-2"]


def test_abandoned_bundle_is_taken_up_again_without_computing_twice() -> None:
    """A bundle that is cancelled and retried gets every answer once, and rows in flight are not submitted again."""
    chunk = rows("lane", 6)
    with driver() as rig:
        rig.open_lane("lane", [])
        rig.submit("lane", chunk)
        first = rig.take("lane", timeout=10)  # the bundle dies here, having yielded `first` in vain
        assert first
        rig.open_lane("lane", [])
        rig.submit("lane", chunk)
        assert names(drain(rig, "lane")) == names([*map_answers(rig, chunk)])
        assert rig.stats().rows_done <= 6 + len(first)


def map_answers(rig: Driver, chunk: list[Prompt]) -> list[Answer]:
    """The same rows from an engine of their own."""
    return list(run(engine(), chunk).values())


def test_unfinished_rows_are_opened_and_durable_ones_forgotten() -> None:
    """Opening a lane with what is not durably yielded gives exactly those answers; what was taken is not kept."""
    chunk = rows("lane", 5)
    with driver() as rig:
        rig.open_lane("lane", [])
        rig.submit("lane", chunk)
        assert len(drain(rig, "lane")) == 5
        rig.open_lane("lane", chunk[3:])
        assert names(drain(rig, "lane")) == ["lane-3", "lane-4"]
        rig.open_lane("lane", chunk[:1])
        assert names(drain(rig, "lane")) == ["lane-0"]
        assert rig.stats().rows_done == 8


def test_equal_keys_are_computed_once_for_two_lanes() -> None:
    """A key that two lanes ask for is computed once and both get it."""
    chunk = rows("same", 2)
    with driver() as rig:
        rig.open_lane("a", chunk)
        rig.open_lane("b", chunk)
        assert names(drain(rig, "a")) == names(drain(rig, "b")) == ["same-0", "same-1"]
        assert rig.stats().rows_done == 2


def test_eight_threads_compete_and_each_lane_is_whole() -> None:
    """Eight threads submit in small chunks under back-pressure: every lane gets its rows once, with the same bits."""
    wanted = {lane: said(run(engine(), rows(lane, 12))) for lane in "abcdefgh"}
    got: dict[str, list[Answer]] = {}

    def work(rig: Driver, lane: str) -> None:
        answers: list[Answer] = []
        rig.open_lane(lane, [])
        for start in range(0, 12, 3):
            while rig.congested():
                answers += rig.relieve(lane, timeout=10)
            rig.submit(lane, rows(lane, 12)[start : start + 3])
        got[lane] = answers + drain(rig, lane)

    with driver(max_rows=4) as rig:
        threads = [threading.Thread(target=work, args=(rig, lane)) for lane in "abcdefgh"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(40)
    assert {lane: len(answers) for lane, answers in got.items()} == dict.fromkeys("abcdefgh", 12)
    assert {lane: said({answer.key.uuid: answer for answer in answers}) for lane, answers in got.items()} == wanted


def test_refused_rows_come_back_as_failures() -> None:
    """A row that can't run is answered like any other, through its lane."""
    with driver() as rig:
        rig.open_lane("lane", [prompt("long", 2000), prompt("good", 5, max_tokens=3)])
        answers = {answer.key.uuid: answer for answer in drain(rig, "lane")}
        assert isinstance(answers["good"], Outcome)
        assert not isinstance(answers["long"], Outcome)


def test_congested_caller_waits_for_room_not_for_its_own_rows() -> None:
    """A lane without rows of its own is let in as soon as another lane's rows have left the queue, without spinning."""
    with driver(max_rows=2) as rig:
        rig.open_lane("busy", rows("busy", 12, max_tokens=60))
        rig.open_lane("new", [])
        looks = 0
        while rig.congested():
            assert rig.relieve("new", timeout=10) == []
            looks += 1
        assert looks <= 1
        assert len(drain(rig, "busy")) == 12


def test_rows_may_come_while_a_lane_feeds_or_rows_wait_outside() -> None:
    """Once every lane has said that it has no more, and all rows have entered the engine, none will come."""
    release = threading.Event()

    def held(snapshot: Snapshot) -> Plan:
        release.wait(20)
        return schedule(snapshot)

    with driver(held, max_rows=1) as rig:
        rig.open_lane("lane")
        assert rig.may_refill()
        rig.fed("lane")
        assert not rig.may_refill()
        rig.submit("lane", rows("lane", 5))
        assert rig.may_refill()
        release.set()
        drain(rig, "lane")
        assert not rig.may_refill()


def test_idle_driver_waits_and_close_ends_its_thread() -> None:
    """Without rows nothing is stepped; closing ends the thread, and later calls say so."""
    with driver() as rig:
        rig.open_lane("lane", rows("lane", 1))
        drain(rig, "lane")
        steps = rig.stats().steps
        time.sleep(0.05)
        assert rig.stats().steps == steps
        rig.close(timeout=20)
        with pytest.raises(EngineError, match="closed"):
            rig.submit("lane", rows("lane", 1))
        assert not any(thread.name == "batchgen-engine" and thread is rig._thread for thread in threading.enumerate())
