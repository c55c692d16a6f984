"""Faults seen in other engines: rows that disturb each other, lose tokens, or are lost themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from batchgen_beam.engine.kv_pool import KVPool, PoolExhausted
from batchgen_beam.engine.scheduler import RowView, Snapshot, schedule
from batchgen_beam.engine.sequence import Status
from batchgen_beam.errors import ErrorCode, OptionError
from batchgen_beam.models.caches import CacheKind, GroupKey
from batchgen_beam.models.fake import FakeModel
from batchgen_beam.models.interface import BatchView, LayerState, Scores
from batchgen_beam.records import Failure, FinishReason, Outcome
from tests.engine.rigs import FACTS, KERNELS, Churn, engine, fake_model, kv_bytes, prompt, run, said


class Overflowing(FakeModel):
    """A model whose logits are not finite once a row has said a certain number of tokens."""

    value = float("nan")

    def head(self, x: LayerState, view: BatchView) -> Scores:
        """NaN or infinity in one place of the logits of every token at position 30."""
        scores = super().head(x, view)
        scores.logits_LV[view.positions_T[view.wanted_W] == 30, 77] = self.value
        return scores


def test_one_outcome_per_row_whatever_is_refused() -> None:
    """Cases 10, 11, 12: rows that can't run fail by name with both numbers, once; the others are untouched."""
    model = fake_model(context=640)
    good = [prompt(f"good-{i}", 20) for i in range(9)]
    bad = [prompt("long", 640), prompt("foreign", 10)]
    bad[1].token_ids[3] = 256
    answers = run(engine(model, kv_memory=kv_bytes(model, 10)), [*good[:4], *bad, *good[4:]])
    assert said({name: answers[name] for name in answers if name.startswith("good")}) == said(run(engine(model), good))
    failures = {name: answer for name, answer in answers.items() if isinstance(answer, Failure)}
    assert {name: failure.code for name, failure in failures.items()} == {
        "long": ErrorCode.PROMPT_TOO_LONG, "foreign": ErrorCode.INVALID_ROW}
    assert "640 tokens" in failures["long"].message
    assert "limit is 640" in failures["long"].message


def test_pool_without_room_for_one_page_is_refused_at_start() -> None:
    """Case 39: a pool that can't hold anything is refused with both numbers and the remedy, before any row waits."""
    model = fake_model(context=640)
    with pytest.raises(OptionError, match=r"one KV page .* need 512 bytes, --kv-memory is 511; raise --kv-memory"):
        engine(model, kv_memory=kv_bytes(model, 1) - 1)


def test_limits_are_each_rows_own() -> None:
    """Cases 14, 20: two rows, two limits, two lengths; without a limit a row ends at the context, never at 16."""
    answers = run(engine(fake_model(context=256)), [prompt("a", 10, max_tokens=3), prompt("b", 10, max_tokens=77),
                                                    prompt("c", 10, max_tokens=None)])
    lengths = {name: answer.completion_tokens for name, answer in answers.items() if isinstance(answer, Outcome)}
    assert lengths == {"a": 3, "b": 77, "c": 246}
    assert {answer.finish_reason for answer in answers.values() if isinstance(answer, Outcome)} == {FinishReason.LENGTH}


def test_end_of_sequence_beats_length_and_counts() -> None:
    """Case B8: EOS as the first token is an answer of one id with `stop`, and on the last place it is `stop` too."""
    said_ids = run(engine(), [prompt("a", 10, max_tokens=5)])["a"]
    assert isinstance(said_ids, Outcome)
    for place in (0, 4):
        token = said_ids.token_ids[place]
        facts = replace(FACTS, eos_ids=frozenset({token}))
        answer = run(engine(facts=facts), [prompt("a", 10, max_tokens=5)])["a"]
        assert isinstance(answer, Outcome)
        assert list(answer.token_ids) == list(said_ids.token_ids[: said_ids.token_ids.index(token) + 1])
        assert answer.finish_reason is FinishReason.STOP


def test_equal_ids_are_both_answered() -> None:
    """Cases 15, B4: the engine's own keys are unique, so two live rows under one id are both answered."""
    rig = engine()
    one, two = prompt("same", 10), prompt("same", 10, max_tokens=7)
    rig.submit(one)
    rig.submit(two)
    while rig.step():
        rig.check_integrity()
    assert sorted(answer.completion_tokens for answer in rig.poll() if isinstance(answer, Outcome)) == [7, 40]


def test_row_above_the_watermark_runs_alone() -> None:
    """Case B1: a row that fits the pool only alone runs alone; the small ones run before and after it."""
    model = fake_model(context=640)
    rows = [prompt("small-1", 30), prompt("large", 560, max_tokens=80), prompt("small-2", 30)]
    answers = run(engine(model, kv_memory=kv_bytes(model, 10)), rows, bound=2000)
    assert said(answers) == said(run(engine(model), rows))


def test_row_that_never_fits_is_its_own_failure() -> None:
    """Cases 39, B1: a row that may outgrow the whole pool fails with both numbers at once; nobody waits for it."""
    model = fake_model(context=640)
    rig = engine(model, kv_memory=kv_bytes(model, 6))
    answers = run(rig, [prompt("large", 300, max_tokens=85), prompt("fits", 300, max_tokens=84)], bound=500)
    failure = answers["large"]
    assert isinstance(failure, Failure)
    assert failure.code is ErrorCode.CAPACITY_EXCEEDED
    assert "385 tokens" in failure.message
    assert "holds 384" in failure.message
    assert isinstance(answers["fits"], Outcome)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_evicted_rows_say_the_same(times: int) -> None:
    """Cases 24, B2: evicted once, twice or three times, a row's answer equals the undisturbed one."""
    rows = [prompt(f"{i}", 20 + 30 * i, max_tokens=150, temperature=i % 2) for i in range(4)]
    churn = Churn(every=2, times=times)
    rig = engine(schedule=churn)
    assert said(run(rig, rows)) == said(run(engine(), rows))
    assert churn.evictions == dict.fromkeys(range(1, 4), times)


def test_allocator_that_fails_rolls_back() -> None:
    """Case B3: status advances only after the pages are committed; a failing reservation leaves no trace."""
    pool = KVPool({GroupKey(CacheKind.PAGED): 4})
    for row in range(4):
        wishes = [(i, 0, 64) for i in range(row)] + [(row, 0, 64 * 4)]
        with pytest.raises(PoolExhausted):
            pool.reserve(wishes)
        assert pool.free == (3,)
        pool.check_integrity()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_fail_their_row(value: float) -> None:
    """Cases 29, B7: NaN or infinite logits are a NUMERIC_ERROR of that row, never an endless token or a random one."""
    model = fake_model()
    broken = Overflowing(model._config, KERNELS)
    broken.value = value
    rows = [prompt("short", 5, max_tokens=10), prompt("meets-it", 20), prompt("prefills-past-it", 50)]
    answers = run(engine(broken), rows)
    failure = answers.pop("meets-it")
    assert isinstance(failure, Failure)
    assert failure.code is ErrorCode.NUMERIC_ERROR
    assert said(answers) == said(run(engine(model), [rows[0], rows[2]]))


@pytest.mark.parametrize("length", [24, 31])
def test_bad_rows_make_room_for_the_next(length: int) -> None:
    """Case B7: where every row that runs fails at once, those that waited for a slot run."""
    broken = Overflowing(fake_model()._config, KERNELS)
    broken.value = float("nan")
    rows = [prompt("meets-it", length), prompt("short", 5, max_tokens=10)]
    answers = run(engine(broken, max_rows=1), rows, bound=200)
    assert isinstance(answers["meets-it"], Failure)
    assert isinstance(answers["short"], Outcome)


def test_seeded_rows_do_not_depend_on_their_mates() -> None:
    """Case 21: a sampled row says the same alone, beside greedy rows, and beside rows of other seeds."""
    row = prompt("seeded", 12, temperature=1.0, seed=7)
    alone = said(run(engine(), [row]))
    mates = [prompt("greedy", 30), prompt("other", 9, temperature=0.7, seed=8), prompt("third", 9, temperature=1.3)]
    assert said(run(engine(), [*mates, row])) | alone == said(run(engine(), [row, *mates]))


def test_equal_prompts_of_different_ids_differ() -> None:
    """Case 22: one seed for all rows is not one noise for all rows; the id is part of the draw."""
    first = prompt("first", 12, temperature=1.0, seed=7)
    second = replace(first, key=replace(first.key, uuid="second"))
    answers = run(engine(), [first, second])
    assert said(answers)["first"] != said(answers)["second"]


def test_tiny_temperature_is_greedy() -> None:
    """Case 25: a temperature under 1e-5 is greedy, and one just above it neither overflows nor fails."""
    greedy, tiny, small = (prompt("a", 12, temperature=t) for t in (0.0, 9e-6, 1e-4))
    assert said(run(engine(), [greedy])) == said(run(engine(), [tiny]))
    [answer] = run(engine(), [small]).values()
    assert isinstance(answer, Outcome)
    assert all(torch.isfinite(torch.tensor(answer.logprobs.chosen)))


@pytest.mark.parametrize("kind", ["paged", "windowed", "state"])
def test_company_and_order_do_not_matter(kind: str) -> None:
    """Case 26: greedy output is the same alone, batched and reordered."""
    rows = [prompt(f"{i}", 3 + 31 * i, max_tokens=90) for i in range(6)]
    alone = {name: bits for row in rows for name, bits in said(run(engine(fake_model(kind)), [row])).items()}
    assert said(run(engine(fake_model(kind)), rows)) == alone == said(run(engine(fake_model(kind)), rows[::-1]))


def test_short_rows_beside_long_ones_are_not_padded() -> None:
    """Case 34: a row of one token beside one of 500 decodes as it does alone; page and position are its own."""
    rows = [prompt("short", 1, max_tokens=80), prompt("long", 500, max_tokens=80)]
    alone = {name: bits for row in rows for name, bits in said(run(engine(), [row])).items()}
    assert said(run(engine(), rows)) == alone


def test_counts_come_from_the_ids_that_ran() -> None:
    """Case B9: token counts are lengths of id lists, in the answer and in the sums."""
    rows = [prompt("a", 17, max_tokens=5), prompt("b", 130, max_tokens=70)]
    rig = engine()
    answers = run(rig, rows)
    counts = {name: (a.prompt_tokens, a.completion_tokens) for name, a in answers.items() if isinstance(a, Outcome)}
    assert counts == {"a": (17, 5), "b": (130, 70)}
    assert (rig.stats().prompt_tokens, rig.stats().generated_tokens) == (147, 75)


def test_plan_does_not_depend_on_the_order_of_rows() -> None:
    """Case B11: the scheduler breaks ties by id, so a shuffled snapshot gives the same decision."""
    rows = tuple(RowView(seq_id=i, status=Status.DECODE, tokens=65, computed=64, pages=(1,), full=True)
                 for i in range(6))
    snapshot = Snapshot(rows=rows, queue=(), groups=(GroupKey(CacheKind.PAGED),), free=(2,), free_host=(0,),
                        free_slots=0, step_tokens=64, prefill_chunk=64)
    assert schedule(snapshot) == schedule(replace(snapshot, rows=rows[::-1])) == schedule(
        replace(snapshot, rows=rows[3:] + rows[:3]))


def test_rows_share_immutable_parameters() -> None:
    """Case 12: one long and nine short rows share one parameter object; the long one fails, the others keep it."""
    shared = prompt("0", 20, max_tokens=12)
    rows = [replace(shared, key=replace(shared.key, uuid=f"{i}")) for i in range(9)]
    long = replace(prompt("long", 1100), params=shared.params)
    answers = run(engine(), [rows[0], long, *rows[1:]])
    assert isinstance(answers.pop("long"), Failure)
    assert {a.completion_tokens for a in answers.values() if isinstance(a, Outcome)} == {12}
    with pytest.raises(AttributeError):
        shared.params.max_tokens = 3  # type: ignore[misc]
