"""Laws of the stateful step: each row leaves once with the same bits, whatever bundles, lanes and order do."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import apache_beam as beam
import pytest
from apache_beam.testing.util import assert_that

from batchgen_beam.errors import EngineError, ErrorCode
from batchgen_beam.models.fake import FakeModel
from batchgen_beam.records import Answer, Outcome, Prompt, token_array
from batchgen_beam.text.fake_folder import write_fake_folder
from batchgen_beam.transforms.generate import CONGESTED_WAIT_SECONDS, Generate, Round
from batchgen_beam.transforms.host import HostHandle
from batchgen_beam.transforms.lane_ledger import COMPACT_FROM
from batchgen_beam.transforms.lanes import ToLanes
from tests.support.hosting import LaneByHand, host_handle, make_prompt

pytestmark = pytest.mark.timeout(60)

Bits = tuple[str, tuple[int, ...], str, bytes, str | None]


@pytest.fixture(scope="module")
def handle(tmp_path_factory: pytest.TempPathFactory) -> HostHandle:
    """One engine for the file's tests."""
    return host_handle(write_fake_folder(tmp_path_factory.mktemp("model") / "fake"))


def _bits(outcome: Outcome) -> Bits:
    """What must not depend on anything but the row."""
    return (outcome.key.text, tuple(outcome.token_ids), str(outcome.finish_reason), outcome.logprobs.chosen.tobytes(),
            outcome.text)


def _by_hand(lane: LaneByHand, prompts: Sequence[Prompt], chunk: int) -> Iterator[tuple[str, Outcome]]:
    lane.begin()
    for start in range(0, len(prompts), chunk):
        yield from lane.process(prompts[start : start + chunk])
    lane.begin()
    yield from lane.finish()


@pytest.mark.parametrize(("lanes", "seed", "bundles"), [(1, 0, 1), (2, 1, 4), (5, 2, 9)])
def test_answers_do_not_depend_on_lanes_bundles_or_order(
        handle: HostHandle, lanes: int, seed: int, bundles: int) -> None:
    """Shuffled rows in several lanes and bundles give the bits of one lane in order, each row once."""
    prompts = [make_prompt(index) for index in range(60)]
    alone = sorted(_bits(outcome) for _, outcome in _by_hand(LaneByHand.of(handle), prompts, 60))
    shuffled = random.Random(seed).sample(prompts, len(prompts))
    groups = [shuffled[start::bundles] for start in range(bundles)]

    def check(answers: list[tuple[str, Outcome]]) -> None:
        assert sorted(_bits(outcome) for _, outcome in answers) == alone
        assert all(key == outcome.key.text for key, outcome in answers)

    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        rows = pipeline | beam.Create(groups) | beam.Reshuffle() | beam.FlatMap(lambda group: group)
        assert_that((rows | ToLanes(lanes) | Generate(handle, Round(hashed=lanes))).answers, check)


def test_equal_rows_are_answered_once(handle: HostHandle) -> None:
    """A row key that comes twice, in one chunk or in two bundles, gives one answer."""
    lane = LaneByHand.of(handle)
    lane.begin()
    answers = lane.process([make_prompt(1), make_prompt(1), make_prompt(2)])
    lane.begin()
    answers += lane.process([make_prompt(2), make_prompt(3)])
    lane.begin()
    answers += lane.finish()
    assert sorted(key for key, _ in answers) == sorted(make_prompt(index).key.text for index in (1, 2, 3))


def test_an_abandoned_bundle_loses_and_doubles_nothing(handle: HostHandle) -> None:
    """A bundle that is thrown away after its answers came gives the same answers when it is run again."""
    prompts = [make_prompt(index) for index in range(100, 130)]
    expected = sorted(_bits(outcome) for _, outcome in _by_hand(LaneByHand.of(handle), prompts, 30))
    lane = LaneByHand.of(handle)
    lane.lane = "abandoned"
    before = lane.begin()
    lane.process(prompts[:20])
    lane.finish()
    lane.abandon(before)
    lane.begin()
    answers = lane.process(prompts[:10])
    before = lane.begin()
    lane.process(prompts[10:25])
    lane.abandon(before)
    lane.begin()
    answers += lane.process(prompts[10:])
    before = lane.begin()
    lane.finish()
    lane.abandon(before)
    lane.begin()
    answers += lane.finish()
    assert sorted(_bits(outcome) for _, outcome in answers) == expected


def test_state_holds_the_rows_that_are_not_answered(handle: HostHandle) -> None:
    """A new process that has only the state finishes exactly the rows that were not yielded."""
    lane = LaneByHand.of(handle)
    lane.lane = "moved"
    lane.begin()
    first = lane.process([make_prompt(index, max_tokens=40) for index in range(200, 240)])
    elsewhere = LaneByHand.of(host_handle(Path(handle.settings.source.model)))
    elsewhere.admitted, elsewhere.done = lane.admitted, lane.done
    elsewhere.begin()
    rest = elsewhere.finish()
    assert sorted(key for key, _ in first + rest) == sorted(make_prompt(i).key.text for i in range(200, 240))
    assert elsewhere.admitted.items == elsewhere.done.items == []


def test_state_is_compacted(handle: HostHandle) -> None:
    """The bags follow the rows in flight, not the rows that a lane has seen."""
    lane = LaneByHand.of(handle)
    lane.lane = "long"
    lane.begin()
    answered, most = 0, 0
    for start in range(0, 2000, 50):
        answered += len(lane.process([make_prompt(index, max_tokens=2) for index in range(3000 + start, 3050 + start)]))
        unfinished = start + 50 - answered
        admitted = sum(len(chunk.prompts) for chunk in lane.admitted.items)
        assert admitted - len(lane.done.items) == unfinished
        most = max(most, admitted - 2 * unfinished)
    assert most <= 2 * COMPACT_FROM
    lane.begin()
    assert answered + len(lane.finish()) == 2000


def test_a_dead_engine_stops_the_step(tmp_path: Path) -> None:
    """Waiters get an EngineError instead of waiting for ever."""
    lane = LaneByHand.of(host_handle(write_fake_folder(tmp_path / "fake")))
    lane.begin()
    lane.process([make_prompt(index, max_tokens=500) for index in range(8)])
    lane.step.setup()
    lane.step._engine.driver.close()
    with pytest.raises(EngineError, match="closed"):
        lane.finish()


def test_eight_threads_share_one_engine(tmp_path: Path) -> None:
    """Lanes that compete for few slots, in threads of their own, give each row once with the bits of one lane."""
    folder = write_fake_folder(tmp_path / "fake")
    prompts = [make_prompt(index) for index in range(200)]
    alone = sorted(_bits(outcome) for _, outcome in _by_hand(LaneByHand.of(host_handle(folder)), prompts, 200))
    shared = host_handle(folder, max_rows=4)
    found: list[list[tuple[str, Outcome]]] = [[] for _ in range(8)]

    def run(number: int) -> None:
        lane = LaneByHand.of(shared)
        lane.lane = f"lane-{number}"
        found[number] += _by_hand(lane, prompts[number::8], 5)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(_bits(outcome) for answers in found for _, outcome in answers) == alone
    assert shared.acquire().loads == 1


def test_a_lane_without_rows_waits_where_the_engine_is_congested(tmp_path: Path) -> None:
    """A lane that has nothing to take sleeps until there is room, and does not ask again and again."""
    handle = host_handle(write_fake_folder(tmp_path / "fake", eos_every=0), max_rows=2)
    busy, idle = LaneByHand.of(handle), LaneByHand.of(handle)
    busy.lane = "busy"
    driver = handle.acquire().engine().driver
    driver.open_lane("busy", [make_prompt(index, max_tokens=200) for index in range(24)])
    asked, relieve = [], driver.relieve

    def counted(lane: str, *, timeout: float) -> list[Answer]:
        asked.append(lane)
        return relieve(lane, timeout=timeout)

    driver.relieve = counted  # type: ignore[method-assign]
    idle.begin()
    started = time.monotonic()
    assert idle.process([]) == []
    assert 1 <= len(asked) <= 2 + (time.monotonic() - started) / CONGESTED_WAIT_SECONDS


def test_a_row_that_the_engine_refuses_shows_its_prompt(tmp_path: Path) -> None:
    """The engine knows ids only; the failure shows the beginning of their text, valid and clipped."""
    lane = LaneByHand.of(host_handle(write_fake_folder(tmp_path / "fake"), kv_memory=1500))
    prompt = replace(make_prompt(0, max_tokens=1000), token_ids=token_array([104, 105, *[0xC3] * 200]))
    lane.begin()
    [(_, failure)] = [*lane.process([prompt]), *lane.finish()]
    assert failure.code is ErrorCode.CAPACITY_EXCEEDED
    assert failure.prompt_head.startswith("hi\N{REPLACEMENT CHARACTER}")
    assert len(failure.prompt_head) <= 120
    assert failure.prompt_head.encode()


def test_an_engine_that_breaks_names_the_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The waiting lane gets an EngineError with what the model raised, not with a closed engine."""
    def broken(self: FakeModel, *arguments: object) -> NoReturn:
        raise ArithmeticError("the head broke")

    monkeypatch.setattr(FakeModel, "head", broken)
    lane = LaneByHand.of(host_handle(write_fake_folder(tmp_path / "fake")))
    lane.begin()
    with pytest.raises(EngineError, match="the head broke") as caught:
        list(_by_hand(lane, [make_prompt(0)], 1))
    assert isinstance(caught.value.__cause__, ArithmeticError)
