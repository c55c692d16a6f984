"""Rounds on the real pipeline over the fake model: rows that move between engines keep their bits, each row once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.util import assert_that, equal_to

from batchgen_beam.engine.migration import Move, MoveCosts
from batchgen_beam.engine.round_plan import expected_remaining, plan_round
from batchgen_beam.errors import OptionError
from batchgen_beam.records import (
    Answer,
    ContinuationRecord,
    EngineRow,
    Outcome,
    Prompt,
    TokenLogprobs,
    float_array,
    token_array,
)
from batchgen_beam.text.fake_folder import write_fake_folder
from batchgen_beam.transforms.generate import Round
from batchgen_beam.transforms.lane_names import lane_name
from batchgen_beam.transforms.lanes import PromptChunk, ToLanes
from batchgen_beam.transforms.progress_files import read_samples, total
from batchgen_beam.transforms.rounds import MAX_ROUNDS, GenerateRounds, NextRound, check_rounds
from tests.support.hosting import LaneByHand, host_handle, make_prompt

pytestmark = pytest.mark.timeout(300)

Bits = tuple[str, tuple[int, ...], str, bytes, str | None]


def bits(answer: Answer) -> Bits:
    """What must not depend on anything but the row."""
    assert isinstance(answer, Outcome), answer
    return (answer.key.text, tuple(answer.token_ids), str(answer.finish_reason), answer.logprobs.chosen.tobytes(),
            answer.text)


def rows(number: int) -> list[Prompt]:
    """Greedy and sampled rows in turn, of 2 to 300 tokens; the long ones are in no order."""
    lengths = random.Random(5).choices((2, 5, 12, 30, 90, 300), (8, 8, 4, 2, 1, 1), k=number)
    return [make_prompt(index, max_tokens=length, temperature=index % 2 * 0.9, seed=index)
            for index, length in enumerate(lengths)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fake model that ends rows by their limit only."""
    return write_fake_folder(tmp_path_factory.mktemp("model") / "fake", eos_every=0)


def undisturbed(model: Path, prompts: Sequence[Prompt]) -> list[Bits]:
    """The bits of rows that ran in one lane of one engine to their end."""
    lane = LaneByHand.of(host_handle(model))
    lane.begin()
    answers = lane.process(prompts)
    return sorted(bits(answer) for _, answer in answers + lane.finish())


@pytest.mark.parametrize(("rounds", "lanes"), [(1, 2), (2, 3), (3, 4)])
def test_answers_do_not_depend_on_the_number_of_rounds(model: Path, tmp_path: Path, rounds: int, lanes: int) -> None:
    """1, 2, 3 rounds: every row once, with the bits of the undisturbed run; rows left every round but the last."""
    prompts = rows(60)
    expected = undisturbed(model, prompts)
    handle = host_handle(model, progress=tmp_path / "progress")

    def check(answers: list[tuple[str, Answer]]) -> None:
        assert sorted(bits(answer) for _, answer in answers) == expected
        assert all(key == answer.key.text for key, answer in answers)

    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        chunks = pipeline | beam.Create(prompts) | beam.Reshuffle() | ToLanes(lanes)
        assert_that(chunks | GenerateRounds(handle, lanes=lanes, slots=2, rounds=rounds), check)
    moves = handle.acquire().tally.moves
    assert (sum(moves.values()) > 0) == (rounds > 1)
    assert moves.keys() <= {move.value for move in Move}


def test_rows_move_between_processes(model: Path, tmp_path: Path) -> None:
    """Two worker processes, each with its engine: rows suspended in one go on in the other with the same bits."""
    prompts = rows(50)
    expected = undisturbed(model, prompts)
    progress = tmp_path / "progress"
    handle = host_handle(model, progress=progress)

    def check(answers: list[tuple[str, Answer]]) -> None:
        assert sorted(bits(answer) for _, answer in answers) == expected

    options = PipelineOptions([], runner="FnApiRunner", direct_num_workers=2, direct_running_mode="multi_processing")
    with beam.Pipeline(options=options) as pipeline:
        chunks = pipeline | beam.Create(prompts) | beam.Reshuffle() | ToLanes(4)
        assert_that(chunks | GenerateRounds(handle, lanes=4, slots=2, rounds=2), check)
    samples = read_samples(str(progress)).samples
    assert sum(sample.engines for sample in samples) == 2
    figures = total(samples)
    assert figures.engine.resumed_rows >= sum(figures.moves.values()) > 0


def _suspended(lane: LaneByHand, prompts: Sequence[EngineRow]) -> tuple[list[Bits], list[ContinuationRecord]]:
    """What a lane answers and what leaves it."""
    lane.begin()
    out = lane.process(prompts) + lane.finish()
    records = [item.value for item in out if isinstance(item, beam.pvalue.TaggedOutput)]
    return [bits(item[1]) for item in out if not isinstance(item, beam.pvalue.TaggedOutput)], records


def test_each_host_takes_over_what_another_has_begun(model: Path) -> None:
    """Rows that go through three engines of their own, twice in the middle of their answer, keep their bits."""
    prompts = rows(40)
    answers: list[Bits] = []
    going: Sequence[EngineRow] = prompts
    for number, tail in enumerate((1.0, 0.25, None), 1):
        given, left = _suspended(LaneByHand.of(host_handle(model), Round(number, None, tail)), going)
        answers += given
        assert (len(left) > 0) == (tail is not None)
        going = left
    assert sorted(answers) == undisturbed(model, prompts)


def record(index: int, generated: int) -> ContinuationRecord:
    """A row that has said some of the 500 tokens that it may."""
    prompt = make_prompt(index, max_tokens=500)
    return ContinuationRecord(
        key=prompt.key, prompt_ids=prompt.token_ids, generated_ids=token_array([65] * generated), params=prompt.params,
        logprobs=TokenLogprobs(chosen=float_array([-1.0] * generated)), content_print="content",
        numeric_print="numeric")


@pytest.mark.parametrize("seed", [0, 1])
def test_the_next_round_has_even_lanes_in_a_fixed_order(model: Path, seed: int) -> None:
    """However the records come: each lane gets its even share of expected tokens, the longest row first."""
    handle = host_handle(model)
    records = [record(index, index * 37 % 400) for index in range(41)]
    expected = {one.key.text: expected_remaining(
        prompt=len(one.prompt_ids), generated=len(one.generated_ids), max_tokens=500,
        context_limit=handle.acquire().model().context_limit) for one in records}
    plan = plan_round(expected.items(), 3)

    def check(chunks: list[tuple[str, PromptChunk]]) -> None:
        found = {lane: [row.key.text for row in chunk.prompts] for lane, chunk in chunks}
        assert found == {lane_name(lane): [key for key in plan if plan[key] == lane] for lane in range(3)}
        loads = [sum(expected[key] for key in keys) for keys in found.values()]
        assert max(loads) - min(loads) <= max(expected.values())

    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        mixed = random.Random(seed).sample(records, len(records))
        assert_that(pipeline | beam.Create(mixed) | beam.Reshuffle() | NextRound(handle, 3), check)


def test_nothing_left_is_no_round(model: Path) -> None:
    """Where every row ended in the first round, the later ones see nothing and nothing fails."""
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        none = pipeline | beam.Create([]).with_output_types(ContinuationRecord)
        assert_that(none | NextRound(host_handle(model), 3), equal_to([]))


def test_a_move_is_judged_by_what_the_engine_has_measured(model: Path) -> None:
    """No engine, or one that has done nothing: nothing to move.  Slow ones would rather send long rows than repeat."""
    idle = host_handle(model).acquire()
    idle.judge_move(1000)
    assert idle.tally.moves == {}
    handle = host_handle(model)
    host, engine = handle.acquire(), handle.acquire().engine()
    host.judge_move(1000)
    assert host.tally.moves == {"recompute": 1}
    _suspended(LaneByHand.of(handle), rows(4))
    stats = engine.driver.stats()
    costs = MoveCosts(kv_bytes=engine.loaded.token_bytes,
                      prefill_speed=(stats.prefilled_tokens + stats.generated_tokens) / stats.busy_seconds)
    assert engine.loaded.token_bytes == 8
    assert engine.cheaper_move(10**6) is costs.cheaper(10**6)


@pytest.mark.parametrize("rounds", [0, -1, MAX_ROUNDS + 1])
def test_numbers_of_rounds_out_of_range_are_refused(rounds: int) -> None:
    """By the flag's name, with the range."""
    with pytest.raises(OptionError, match=f"--rounds={rounds}: between 1 and {MAX_ROUNDS}"):
        check_rounds(rounds)
