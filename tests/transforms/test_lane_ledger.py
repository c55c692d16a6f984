"""Laws of the two bags: every admitted row is answered once, whatever bundles see of it, and the bags stay small."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen_beam.errors import ErrorCode
from batchgen_beam.records import Failure, Prompt, RowKey, SamplingParams, token_array
from batchgen_beam.transforms.lane_ledger import COMPACT_FROM, LaneLedger


def _prompt(index: int) -> Prompt:
    key = RowKey(f"row-{index}", f"{index:064x}")
    return Prompt(key=key, token_ids=token_array([index + 1]), params=SamplingParams())


def _answer(index: int) -> Failure:
    return Failure(key=_prompt(index).key, code=ErrorCode.CANCELLED, message="")


def test_equal_keys_are_admitted_once() -> None:
    """A key that is unfinished or done is not computed again."""
    ledger = LaneLedger([_prompt(0), _prompt(1)], [_prompt(1).key.text])
    assert [p.key.uuid for p in ledger.admit([_prompt(0), _prompt(1), _prompt(2), _prompt(2)])] == ["row-2"]


def test_an_answer_leaves_once() -> None:
    """The second answer of a row is dropped."""
    ledger = LaneLedger([_prompt(0)])
    assert ledger.accept(_answer(0))
    assert not ledger.accept(_answer(0))
    assert ledger.unfinished == []


def test_an_early_answer_waits_for_its_row() -> None:
    """What an abandoned bundle left behind is let out when the row arrives, and only then."""
    ledger = LaneLedger()
    assert not ledger.accept(_answer(3))
    assert ledger.take_early() == []
    ledger.admit([_prompt(3)])
    [early] = ledger.take_early()
    assert ledger.accept(early)
    assert ledger.take_early() == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 400), st.booleans()), max_size=600), st.integers(0, 2**16))
def test_state_loses_nothing_and_stays_small(events: list[tuple[int, bool]], cut: int) -> None:
    """Bags, compacted as the ledger asks, always describe exactly the unfinished rows, also for the next bundle."""
    ledger, admitted, done = LaneLedger(), list[Prompt](), list[str]()
    open_rows, answered = set[str](), set[str]()
    for step, (index, is_answer) in enumerate(events):
        key = _prompt(index).key.text
        if is_answer:
            if key in open_rows and ledger.accept(_answer(index)):
                done.append(key)
                open_rows.discard(key)
                answered.add(key)
        else:
            admitted += ledger.admit([_prompt(index)])
            open_rows |= {key} - answered
        if ledger.wants_compaction():
            admitted, done = ledger.compacted(), []
        if step == cut % max(len(events), 1):
            ledger = LaneLedger(admitted, done)
            answered = set(done)
        assert {p.key.text for p in ledger.unfinished} == open_rows
        assert {p.key.text for p in LaneLedger(admitted, done).unfinished} == open_rows
        assert len(done) <= max(COMPACT_FROM, (len(admitted) + 1) // 2)
