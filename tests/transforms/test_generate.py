"""Laws of the stateful step: each row leaves once with the same bits, whatever bundles, lanes and order do."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.testing.util import assert_that

from batchgen_beam.errors import EngineError
from batchgen_beam.records import Outcome, Prompt
from batchgen_beam.transforms.generate import Generate
from batchgen_beam.transforms.host import HostHandle
from batchgen_beam.transforms.lane_ledger import COMPACT_FROM
from batchgen_beam.transforms.lanes import ToLanes
from batchgen_beam.text.fake_folder import write_fake_folder
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
        assert_that(rows | ToLanes(lanes) | Generate(handle), check)


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
    elsewhere = LaneByHand.of(host_handle(Path(handle.settings.model)))
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
