"""The engine over fake models of each cache kind: any pressure, any chunking, the same bits, in bounded steps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen_beam.errors import ErrorCode
from batchgen_beam.records import ContinuationRecord, Failure
from tests.engine.rigs import FACTS, Churn, engine, fake_model, finish, kv_bytes, prompt, run, said

KINDS = ("paged", "windowed", "state")
LENGTHS = [1, 3, 40, 63, 64, 65, 130, 200]
PROMPTS = [prompt(f"row-{i}", length, max_tokens=150 + i, temperature=i % 2, top_p=0.9, logprobs=i % 3)
           for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each cache kind in turn."""
    return str(request.param)


@pytest.fixture(scope="module")
def undisturbed(kind: str) -> dict[str, tuple[object, ...]]:
    """Every row alone in an engine of its own."""
    return {name: bits for one in PROMPTS for name, bits in said(run(engine(fake_model(kind)), [one])).items()}


@pytest.mark.parametrize("chunk", [1, 7, 64, 100, 0])
def test_chunks_do_not_matter(kind: str, undisturbed: dict[str, tuple[object, ...]], chunk: int) -> None:
    """Prompts in chunks of any size, with other rows decoding beside them, give the same bits."""
    assert said(run(engine(fake_model(kind), prefill_chunk=chunk), PROMPTS)) == undisturbed


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_batch_size_and_order_do_not_matter(kind: str, undisturbed: dict[str, tuple[object, ...]], rows: int) -> None:
    """Any number of rows at once, in any order, gives the same bits; a freed slot is filled on the next step."""
    mixed = random.Random(rows).sample(PROMPTS, len(PROMPTS))
    assert said(run(engine(fake_model(kind), max_rows=rows), mixed)) == undisturbed


def test_holds_and_evictions_do_not_matter(kind: str, undisturbed: dict[str, tuple[object, ...]]) -> None:
    """Every row held twice, every row but the oldest evicted twice: the same bits, no page lost."""
    churn = Churn(every=3)
    rig = engine(fake_model(kind), schedule=churn, kv_host_memory=1 << 20)
    assert said(run(rig, PROMPTS)) == undisturbed
    assert churn.holds == dict.fromkeys(range(8), 2)
    assert churn.evictions == dict.fromkeys(range(1, 8), 2)
    stats = rig.stats()
    assert stats.holds >= 16
    assert stats.evictions >= 14
    assert stats.recomputed_tokens > 0


def test_tiny_pool_does_not_matter() -> None:
    """Rows that fight for eleven pages are evicted again and again and say the same."""
    model = fake_model(context=640)
    calm = said(run(engine(model), PROMPTS))
    rig = engine(model, kv_memory=kv_bytes(model, 11))
    assert said(run(rig, PROMPTS)) == calm
    assert rig.stats().evictions > 0


def test_resumed_after_every_event(kind: str, undisturbed: dict[str, tuple[object, ...]]) -> None:
    """After every event of a run, every sequence rebuilt from its record in a fresh engine gives the same bits."""
    model = fake_model(kind)
    rows = [one for one in PROMPTS if one.key.uuid in ("row-1", "row-4", "row-6")]
    wanted = {one.key.uuid: undisturbed[one.key.uuid] for one in rows}
    events = 0
    while True:
        rig = engine(model)
        for one in rows:
            rig.submit(one)
        while rig.stats().events <= events and rig.step():
            pass
        answers = {answer.key.uuid: answer for answer in rig.poll()}
        records = [ContinuationRecord.from_bytes(record.to_bytes()) for record in rig.suspend_all()]
        rig.check_integrity()
        if not records:
            break
        fresh = engine(model)
        for record in records:
            fresh.resume(record)
        assert said(answers | finish(fresh)) == wanted, events
        events = rig.stats().events
    assert events > 12


def test_suspended_between_events_goes_on_with_the_same_bits(kind: str,
                                                             undisturbed: dict[str, tuple[object, ...]]) -> None:
    """A record is valid at every step boundary, in the middle of a page too."""
    model = fake_model(kind)
    rig = engine(model)
    for one in PROMPTS:
        rig.submit(one)
    answers = {}
    for _ in range(1000):
        for _ in range(13):
            rig.step()
        answers |= {answer.key.uuid: answer for answer in rig.poll()}
        records = rig.suspend_all()
        if not records:
            break
        rig = engine(model)
        for record in records:
            rig.resume(record)
    assert said(answers) == undisturbed


def test_continuation_of_another_print_is_refused() -> None:
    """Bits may only go on under the print that made them."""
    rig = engine()
    rig.submit(PROMPTS[2])
    rig.step()
    [record] = rig.suspend_all()
    other = engine(facts=replace(FACTS, numeric_print="another CPU"))
    with pytest.raises(ValueError, match="numeric_print 'numeric' can't go on under 'another CPU'"):
        other.resume(record)


def test_reprefill_takes_few_forward_calls() -> None:
    """Re-prefilling 512 tokens takes at most 64 forward calls: it runs in chunks, not token by token."""
    rig = engine()
    rig.submit(prompt("long", 300, max_tokens=300))
    while rig.stats().generated_tokens < 213:
        rig.step()
    [record] = rig.suspend_all()
    assert len(record.prompt_ids) + len(record.generated_ids) == 513
    fresh = engine()
    fresh.resume(record)
    while fresh.stats().generated_tokens == 0:
        fresh.step()
    assert fresh.stats().forward_calls <= 64
    assert fresh.stats().recomputed_tokens == 512


def test_windowed_rows_free_pages_behind_the_window() -> None:
    """A long windowed row never owns more pages than its window touches, once its prompt is in."""
    model = fake_model("windowed", window=100)
    rig = engine(model)
    rig.submit(prompt("long", 400, max_tokens=300))
    rig.step()
    used = set()
    while rig.step():
        if rig.stats().generated_tokens > 1:
            used.add(rig.stats().pages_used)
    assert max(used) <= 3


MIXES = st.lists(st.tuples(st.integers(1, 700), st.integers(1, 100)), min_size=1, max_size=8)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(MIXES, st.integers(5, 24), st.integers(1, 6), st.sampled_from([0, 4]), st.sampled_from([0, 17, 64]),
       st.sampled_from(["paged", "windowed"]))
def test_every_row_ends_in_bounded_steps(mix: list[tuple[int, int]], pages: int, rows: int, host: int,
                                         chunk: int, kind: str) -> None:
    """Whatever the lengths, each row is answered, or fails by name if it can't fit, in a bounded number of steps."""
    model = fake_model(kind, context=640, layers=1)
    rig = engine(model, kv_memory=kv_bytes(model, pages), kv_host_memory=kv_bytes(model, host), max_rows=rows,
                 prefill_chunk=chunk)
    prompts = [prompt(f"{i}", length, max_tokens=tokens) for i, (length, tokens) in enumerate(mix)]
    bound = 50 + 3 * sum(length + tokens for length, tokens in mix)
    answers = run(rig, prompts, bound=bound)
    codes = {name: answer.code if isinstance(answer, Failure) else None for name, answer in answers.items()}
    assert codes == {f"{i}": code_of(length, tokens, pages) for i, (length, tokens) in enumerate(mix)}


def code_of(length: int, tokens: int, pages: int) -> ErrorCode | None:
    """Why a row can't run in a pool of so many pages and a context of 640."""
    if length >= 640:
        return ErrorCode.PROMPT_TOO_LONG
    return ErrorCode.CAPACITY_EXCEEDED if min(length + tokens, 640) > 64 * pages else None


@pytest.mark.parametrize("pages", [40, 200])
def test_little_is_computed_twice_under_a_long_tail(pages: int) -> None:
    """1,024 rows with long-tailed outputs for 128 slots: under 5 % of the tokens are computed twice.

    Prompt and output lengths are drawn as in such workloads: prompts of about 56 tokens, outputs with median 33, mean
    54 and maximum 512 (log-normal, clipped).
    """
    draw = random.Random(5)
    model = fake_model(context=640, layers=1)
    prompts = [prompt(f"{i}", draw.randint(30, 80), max_tokens=min(512, max(1, int(draw.lognormvariate(3.5, 0.95)))))
               for i in range(1024)]
    rig = engine(model, max_rows=128, kv_memory=kv_bytes(model, pages), step_tokens=512)
    for one in prompts:
        rig.submit(one)
    while rig.step():
        pass
    rig.check_integrity()
    stats = rig.stats()
    assert stats.rows_done == 1024
    assert stats.recomputed_tokens < 0.05 * (stats.prompt_tokens + stats.generated_tokens)


def test_decode_rows_are_visited_at_page_ends_only() -> None:
    """A sequence meets the scheduler at its own page end, not at every token."""
    rig = engine()
    run(rig, [prompt("a", 64, max_tokens=320)])
    assert rig.stats().events <= 8


def test_rows_wait_run_and_leave() -> None:
    """Queued rows wait, admitted rows are active, all leave."""
    rig = engine(max_rows=2)
    for i in range(5):
        rig.submit(prompt(f"{i}", 10))
    rig.step()
    stats = rig.stats()
    assert (stats.queued, stats.active, stats.waiting) == (3, 2, 0)
    finish(rig)
    assert (rig.stats().queued, rig.stats().active) == (0, 0)
