"""Rows that begin with the same pages read them once computed, and say what they would say alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen_beam.engine import prefix_cache
from batchgen_beam.engine.kv_pool import KVPool, PoolExhausted
from batchgen_beam.engine.prefix_cache import PromptPages
from batchgen_beam.models.caches import CacheKind, GroupKey
from batchgen_beam.records import Outcome, Prompt, RowKey, SamplingParams, token_array
from tests.engine.rigs import Churn, engine, fake_model, finish, kv_bytes, run, said

PAGED = GroupKey(CacheKind.PAGED)


def words(name: str, count: int) -> list[int]:
    """Token ids that follow from a name."""
    draw = random.Random(name)
    return [draw.randrange(32, 127) for _ in range(count)]


def row(name: str, ids: Sequence[int], *, max_tokens: int = 20) -> Prompt:
    """A greedy row."""
    return Prompt(key=RowKey(uuid=name, digest="0" * 64), token_ids=token_array(ids),
                  params=SamplingParams(temperature=0.0, max_tokens=max_tokens))


def cached(answers: dict[str, object]) -> dict[str, int]:
    """`cached_tokens` by id."""
    return {name: answer.cached_tokens for name, answer in answers.items() if isinstance(answer, Outcome)}


@pytest.mark.parametrize("length", [63, 64, 65, 127, 128, 129, 300])
def test_equal_prompts_are_answered_like_singles(length: int) -> None:
    """Case 36: of two equal prompts the second reads what is full before its last token, and both say the same."""
    ids = words("twice", length)
    single = said(run(engine(), [row("a", ids)])) | said(run(engine(), [row("b", ids)]))
    rig = engine()
    answers = run(rig, [row("a", ids), row("b", ids)])
    assert said(answers) == single
    whole = (length - 1) // 64 * 64
    assert cached(answers) == {"a": 0, "b": whole}
    assert rig.stats().cached_tokens == whole
    assert rig.stats().prefilled_tokens == 2 * length - whole


def test_a_prefix_outlives_its_rows() -> None:
    """Pages of ended rows stay until their memory is wanted."""
    ids = words("late", 200)
    rig = engine()
    run(rig, [row("first", ids)])
    rig.submit(row("second", [*ids[:190], 40]))
    assert cached(finish(rig)) == {"second": 128}


def test_rows_wait_for_the_one_that_computes_their_prefix() -> None:
    """Many rows at once with one prefix: it is computed once, though none had it when they came."""
    common = words("common", 256)
    rows = [row(f"{i}", common + words(f"tail {i}", 10 + i)) for i in range(8)]
    rig = engine()
    answers = run(rig, rows)
    assert rig.stats().prefilled_tokens == sum(len(one.token_ids) for one in rows) - 7 * 256
    assert cached(answers) == {"0": 0} | {f"{i}": 256 for i in range(1, 8)}
    assert said(answers) == said(run(engine(prefix_sharing=False), rows))


@pytest.mark.parametrize("pages", [14, 15, 20])
def test_tiny_pool_with_a_shared_prefix(pages: int) -> None:
    """Case 37: rows that share a prefix are preempted, come back and hit it again; nothing is lost or changed."""
    common = words("common", 150)
    rows = [row(f"{i}", common[: 150 - i % 3] + words(f"tail {i}", 5 * i), max_tokens=60 + 17 * (i % 5))
            for i in range(20)]
    model = fake_model()
    small = engine(model, kv_memory=kv_bytes(model, pages), kv_host_memory=kv_bytes(model, 6))
    answers = run(small, rows)
    assert small.stats().holds + small.stats().evictions > 0
    assert said(answers) == said(run(engine(), rows))


def test_holds_and_evictions_of_sharing_rows() -> None:
    """A held row takes copies with it, an evicted one finds its prefix again."""
    common = words("common", 140)
    rows = [row(f"{i}", common + words(f"tail {i}", i), max_tokens=90) for i in range(8)]
    model = fake_model()
    churn = Churn(every=3)
    rig = engine(model, schedule=churn, kv_memory=kv_bytes(model, 40), kv_host_memory=kv_bytes(model, 20))
    assert said(run(rig, rows)) == said(run(engine(prefix_sharing=False), rows))
    assert churn.holds
    assert churn.evictions


@pytest.mark.parametrize("bits", [0, 1])
def test_equal_digests_of_other_tokens_are_no_hit(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 38: with digests of one bit, or none, rows still read only pages of their own tokens."""
    honest = prefix_cache.chained_digest
    monkeypatch.setattr(prefix_cache, "chained_digest",
                        lambda parent, tokens: bytes([honest(parent, tokens)[0] & (2**bits - 1)]))
    rows = [row(f"{i}", words(f"{i % 5}", 200) + words(f"tail {i}", 9)) for i in range(12)]
    assert said(run(engine(), rows)) == said(run(engine(prefix_sharing=False), rows))


@pytest.mark.parametrize("kind", ["windowed", "state"])
def test_layers_that_forget_share_nothing(kind: str) -> None:
    """A prefix can't be read where a window or a recurrent state has moved on."""
    rows = [row(f"{i}", words("common", 200)) for i in range(3)]
    answers = run(engine(fake_model(kind)), rows)
    assert cached(answers) == {"0": 0, "1": 0, "2": 0}
    assert said(answers) == said(run(engine(fake_model(kind), max_rows=1), rows))


def test_a_suspended_leader_leaves_its_followers() -> None:
    """The row that computes a prefix is suspended midway: one that waited for it computes on."""
    common = words("common", 256)
    rows = [row(f"{i}", [*common, 40 + i]) for i in range(3)]
    rig = engine(step_tokens=64)
    for one in rows:
        rig.submit(one)
    rig.step()
    (record,) = rig.suspend([rows[0].key.text])
    answers = finish(rig)
    assert answers.keys() == {"1", "2"}
    rig.resume(record)
    assert said(answers | finish(rig)) == said(run(engine(), rows))


def test_pages_that_nobody_reads_do_not_take_fresh_memory() -> None:
    """Prompts that come once go through the same pages; an eighth of the pool may keep what nobody reads."""
    rig = KVPool({PAGED: 81})
    touched = set()
    for sequence in range(40):
        rig.commit(rig.reserve([(sequence, 0, 300)]))
        touched |= set(rig.table(sequence, PAGED)[1])
        rig.publish(sequence, PromptPages(token_array(words(f"{sequence}", 300))), 300)
        rig.release(sequence)
    assert len(touched) <= 80 // 8 + 5 + 4
    assert len(rig.prefix_users) >= 80 // 8 - 4


MIXES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 200), st.integers(1, 60), st.integers(1, 90)), min_size=1,
                 max_size=12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(MIXES, st.integers(8, 16), st.integers(1, 6), st.integers(0, 8), st.integers(1, 100))
def test_any_mix_of_prefixes_says_what_it_says_unshared(mix: list[tuple[int, int, int, int]], pages: int, slots: int,
                                                        host: int, chunk: int) -> None:
    """Rows of some prefixes over small pools end in bounded steps, as in a roomy engine that shares nothing."""
    rows = [row(f"{i}", words(f"{prefix}", common) + words(f"tail {i}", tail), max_tokens=answer)
            for i, (prefix, common, tail, answer) in enumerate(mix)]
    model = fake_model()
    rig = engine(model, kv_memory=kv_bytes(model, pages), kv_host_memory=kv_bytes(model, host), max_rows=slots,
                 prefill_chunk=chunk)
    assert said(run(rig, rows, bound=3000)) == said(run(engine(prefix_sharing=False), rows))


ACTIONS = st.lists(st.tuples(st.sampled_from(["begin", "publish", "grow", "hold", "restore", "release"]),
                             st.integers(0, 5), st.integers(1, 400)), max_size=60)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(ACTIONS)
def test_any_history_of_sharing_keeps_integrity(history: list[tuple[str, int, int]]) -> None:
    """Whatever rows share, hold and release, each page has one owner and each prefix its true readers."""
    rig = KVPool({PAGED: 14}, {PAGED: 8})
    prompts = [PromptPages(token_array(words("ab"[i % 2], 128) + words(f"{i // 3}", 128))) for i in range(6)]
    length: dict[int, int] = {}
    held: dict[int, int] = {}
    for action, sequence, tokens in history:
        try:
            if action == "begin" and sequence not in length and sequence not in held:
                rig.adopt(sequence, rig.match(sequence, prompts[sequence], 3))
                length[sequence] = 0
                rig.commit(rig.reserve([(sequence, 0, 256)]))
                length[sequence] = 256
            elif action == "publish" and length.get(sequence):
                rig.publish(sequence, prompts[sequence], min(tokens, 256))
            elif action == "grow" and length.get(sequence):
                rig.commit(rig.reserve([(sequence, 256, max(tokens, length[sequence]))]))
                length[sequence] = max(tokens, length[sequence])
            elif action == "hold" and length.get(sequence):
                rig.hold(sequence)
                held[sequence] = length.pop(sequence)
            elif action == "restore" and sequence in held:
                rig.restore(sequence)
                length[sequence] = held.pop(sequence)
            elif action == "release":
                rig.release(sequence)
                length.pop(sequence, None)
                held.pop(sequence, None)
        except PoolExhausted:
            pass
        rig.check_integrity()
    for sequence in range(6):
        rig.release(sequence)
    rig.check_integrity()
    assert rig.free == (13,)
    rig.commit(rig.reserve([(9, 0, 13 * 64)]))
    assert rig.prefix_users == {}
