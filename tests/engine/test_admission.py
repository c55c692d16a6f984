"""Rows that may run longest enter first; what is not known is not told apart."""

from __future__ import annotations

import pytest

from batchgen_beam.engine.admission import AdmissionQueue
from batchgen_beam.engine.sequence import Sequence
from batchgen_beam.records import Outcome, Prompt, RowKey, SamplingParams, token_array
from tests.engine.rigs import engine, fake_model, kv_bytes, prompt, run, said


def row(name: str, max_tokens: int | None, length: int = 10) -> Sequence:
    """A row that has not begun."""
    limit = 1024 if max_tokens is None else length + max_tokens
    return Sequence(0, prompt(name, length, max_tokens=max_tokens), limit=limit, content_print="c", numeric_print="n")


@pytest.mark.parametrize(("longest_first", "order"), [(True, "dbaec"), (False, "abcde")])
def test_longest_first_and_equals_as_they_came(longest_first: bool, order: str) -> None:
    """An answer without a limit may be the longest."""
    queue = AdmissionQueue(longest_first=longest_first)
    for name, limit in zip("abcde", (30, 40, 20, None, 30), strict=True):
        queue.add(row(name, limit))
    assert "".join(one.key.uuid for one in queue) == order
    assert "".join(one.key.uuid for one in queue.first(2)) == order[:2]
    assert "".join(one.key.uuid for one in queue.pop(2)) == order[:2]
    assert len(queue) == 3
    assert [one.key.uuid for one in queue.take({queue.first(3)[1].key.text})] == [order[3]]
    assert "".join(one.key.uuid for one in queue) == order[2] + order[4]


def begins(name: str, *prefix: int, tail: int = 1) -> Sequence:
    """A row whose prompt begins with these pages, each of one token that is repeated, and ends with its own."""
    ids = [token for token in prefix for _ in range(64)] + [9] * tail
    return Sequence(0, Prompt(key=RowKey(uuid=name, digest="0" * 64), token_ids=token_array(ids),
                              params=SamplingParams(max_tokens=40)), limit=len(ids) + 40, content_print="c",
                    numeric_print="n")


@pytest.mark.parametrize(("by_prefix", "order"), [(True, "acgiebfhjkd"), (False, "abcdefghijk")])
def test_rows_with_a_common_prefix_stand_together(by_prefix: bool, order: str) -> None:
    """Where the first of them stands, the longest prefix first; what fills no page counts for nothing."""
    queue = AdmissionQueue(by_prefix=by_prefix)
    prompts = {"a": (1, 2), "b": (3,), "c": (1, 2), "d": (), "e": (1, 4), "f": (3, 2), "g": (1, 2, 5), "h": (3, 2),
               "i": (1, 2, 5), "j": (3, 2, 1), "k": (3, 6)}
    for name, prefix in prompts.items():
        queue.add(begins(name, *prefix))
    assert "".join(one.key.uuid for one in queue) == order


def test_a_prefix_of_which_no_row_waits_is_forgotten() -> None:
    """While some wait, those that come later stand with them, also when the first has left; then in their own place."""
    queue = AdmissionQueue()
    for name, page in (("a", 1), ("b", 2), ("c", 1)):
        queue.add(begins(name, page))
    assert [one.key.uuid for one in queue.pop(1)] == ["a"]
    queue.add(begins("d", 1))
    assert "".join(one.key.uuid for one in queue) == "cdb"
    assert [one.key.uuid for one in queue.take({begins("c", 1).key.text, begins("d", 1).key.text})] == ["c", "d"]
    queue.add(begins("e", 1))
    assert "".join(one.key.uuid for one in queue) == "be"


def test_longer_rows_go_before_common_prefixes() -> None:
    """Only rows that are expected to be as long as each other are told apart by their prompts, whose place is that of
    the first one in the whole queue."""
    queue = AdmissionQueue()
    for name, page, limit in (("a", 1, 80), ("b", 2, 90), ("c", 1, 80), ("d", 2, 20), ("e", 1, 90)):
        one = begins(name, page)
        one.limit = 65 + limit
        queue.add(one)
    assert "".join(one.key.uuid for one in queue) == "ebacd"


def test_prefixes_are_read_before_their_memory_is_wanted() -> None:
    """Rows of six documents come in turn: each document is computed about once, not once for nearly every row."""
    documents = [prompt(f"document {i}", 320).token_ids for i in range(6)]
    rows = [Prompt(key=RowKey(uuid=f"{i}", digest="0" * 64), token_ids=documents[i % 6] + token_array([40 + i]),
                   params=SamplingParams(temperature=0.0, max_tokens=8)) for i in range(48)]
    model = fake_model()
    rig = engine(model, max_rows=2, kv_memory=kv_bytes(model, 16))
    answers = run(rig, rows)
    assert said(answers) == said(run(engine(prefix_sharing=False), rows))
    assert rig.stats().cached_tokens == 42 * 320


def test_a_long_row_that_comes_last_takes_no_steps_of_its_own() -> None:
    """32 rows of 10 tokens and one of 80 over four slots: about 90 steps instead of about 160, and equal answers."""
    rows = [prompt(f"{i}", 5, max_tokens=10) for i in range(32)] + [prompt("long", 5, max_tokens=80)]
    steps = {}
    answers = {}
    for longest_first in (True, False):
        rig = engine(max_rows=4, longest_first=longest_first)
        answers[longest_first] = run(rig, rows)
        steps[longest_first] = rig.stats().steps
    assert said(answers[True]) == said(answers[False])
    assert all(isinstance(answer, Outcome) for answer in answers[True].values())
    assert steps[True] <= 110
    assert steps[False] >= 150
