"""Rows that may run longest enter first; what is not known is not told apart."""

from __future__ import annotations

import pytest

from batchgen_beam.engine.admission import AdmissionQueue
from batchgen_beam.engine.sequence import Sequence
from batchgen_beam.records import Outcome
from tests.engine.rigs import engine, prompt, run, said


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
