"""The order proof: what happens to answers between Generate and the published files.

Every pipeline here is the real one, with only the answering replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from batchgen_beam.errors import PublishError
from batchgen_beam.records import Outcome, OutputUnit, RowKey, token_array
from batchgen_beam.storage.units import Manifest, PlacedAnswer
from batchgen_beam.transforms.publish import restore_order
from tests.support.jobs import published
from tests.support.storing import Keyed, outcome, run_storage, write_table

COUNT = 23


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Two files of 23 rows, in row groups of 10 and units of 4."""
    for name in "ab":
        write_table(tmp_path / f"{name}.parquet", {
            "uuid": [f"{name}{index}" for index in range(COUNT)],
            "prompt": [f"p {index}" for index in range(COUNT)]}, row_group_size=10)
    return tmp_path


def run(inputs: Path, **options: Any) -> dict[str, Any]:
    """The job over both files."""
    return run_storage([inputs / "*.parquet"], inputs / "out", unit_rows=4, **options)


def ids_of(inputs: Path) -> list[str]:
    """Published ids, files by name, rows as they stand."""
    return [row["uuid"] for row in published(inputs / "out")]


IN_ORDER = [f"{name}{index}" for name in "ab" for index in range(COUNT)]


def test_undisturbed(inputs: Path) -> None:
    """Every row is answered once, where it stood."""
    counts = run(inputs)
    assert ids_of(inputs) == IN_ORDER
    assert (counts["units"], counts["rows"], counts["results"], counts["failed"]) == (14, 46, 46, 0)
    assert (inputs / "out" / "_SUCCESS").exists()


def test_any_order_is_put_right(inputs: Path) -> None:
    """Answers shuffled between Generate and Publish, over units too, come out in input order."""
    held: list[Keyed] = []
    everything = 2 * COUNT

    def shuffled(keyed: Keyed) -> Iterator[Keyed]:
        held.append(keyed)
        if len(held) == everything:
            yield from Random(1).sample(held, everything)

    assert run(inputs, tamper=InProcess(shuffled))["results"] == everything
    assert ids_of(inputs) == IN_ORDER


class InProcess:
    """A function that keeps its closure when Beam pickles it."""

    functions: dict[int, Any] = {}

    def __init__(self, function: Any) -> None:
        self.number = id(function)
        self.functions[self.number] = function

    def __call__(self, element: Any) -> Iterable[Any]:
        yield from self.functions[self.number](element)


def drop(keyed: Keyed) -> Iterator[Keyed]:
    """Lose the answer of row b13."""
    if keyed[1].key.uuid != "b13":
        yield keyed


def test_a_dropped_answer_fails_by_name(inputs: Path) -> None:
    """A row whose answer is lost stops the run by its id and unit, and there is no `_SUCCESS`."""
    message = r"row 'b13' .* of unit file://.*/b\.parquet#rg-000001-s-0000, row 3, has no answer"
    with pytest.raises(RuntimeError, match=message):
        run(inputs, tamper=drop)
    assert not (inputs / "out" / "_SUCCESS").exists()
    assert not (inputs / "out" / "run.json").exists()


def duplicate(keyed: Keyed) -> Iterator[Keyed]:
    """Answer row a5 three times."""
    yield from [keyed] * (3 if keyed[1].key.uuid == "a5" else 1)


def test_duplicated_answers_collapse(inputs: Path) -> None:
    """The same answer three times is published once; the run says that two were dropped."""
    counts = run(inputs, tamper=duplicate)
    assert ids_of(inputs) == IN_ORDER
    assert (counts["results"], counts["collapsed"], counts["conflicts"]) == (46, 2, 0)


def contradict(keyed: Keyed) -> Iterator[Keyed]:
    """Answer row a5 otherwise too, on a machine whose print is less."""
    yield keyed
    if keyed[1].key.uuid == "a5" and isinstance(keyed[1], Outcome):
        yield keyed[0], outcome(keyed[1].key, numeric_print="earlier", token_ids=token_array([4]), text="other")


def test_contradicting_answers_are_counted(inputs: Path) -> None:
    """Of two answers that differ, the least numeric print is published and a conflict is counted."""
    counts = run(inputs, tamper=contradict)
    assert (counts["results"], counts["collapsed"], counts["conflicts"]) == (46, 0, 1)
    assert [row["text"] for row in published(inputs / "out") if row["uuid"] == "a5"] == ["other"]


def invent(keyed: Keyed) -> Iterator[Keyed]:
    """Add an answer that no row asked for."""
    yield keyed
    if keyed[1].key.uuid == "a0":
        stranger = RowKey("stranger", "d")
        yield stranger.text, outcome(stranger)


def test_a_foreign_answer_fails_by_name(inputs: Path) -> None:
    """An answer that belongs to no input row stops the run by its id."""
    with pytest.raises(RuntimeError, match="answer for row 'stranger'"):
        run(inputs, tamper=invent)


def move(keyed: tuple[str, PlacedAnswer]) -> Iterator[tuple[str, PlacedAnswer]]:
    """Send the answer of row a1 to the next unit."""
    unit, place = keyed
    yield (unit.replace("s-0000", "s-0001") if place.key.uuid == "a1" else unit), place


def repeat(keyed: tuple[str, PlacedAnswer]) -> Iterator[tuple[str, PlacedAnswer]]:
    """Place the answer of row a1 twice."""
    yield from [keyed] * (2 if keyed[1].key.uuid == "a1" else 1)


def mislay(keyed: tuple[str, PlacedAnswer]) -> Iterator[tuple[str, PlacedAnswer]]:
    """Lose the placed answer of row a1."""
    if keyed[1].key.uuid != "a1":
        yield keyed


def exile(keyed: tuple[str, PlacedAnswer]) -> Iterator[tuple[str, PlacedAnswer]]:
    """Send the answer of row a1 to a unit that does not exist."""
    yield ("file:///nowhere#rg-000000-s-0000" if keyed[1].key.uuid == "a1" else keyed[0]), keyed[1]


@pytest.mark.parametrize(("tamper", "message"), [
    (move, r"a\.parquet#rg-000000-s-000[01]: 1 row (without answer|foreign to it): 'a1'"),
    (repeat, r"a\.parquet#rg-000000-s-0000: 1 row answered twice: 'a1'"),
    (mislay, r"a\.parquet#rg-000000-s-0000: 1 row without answer: 'a1'"),
    (exile, r"(nowhere#rg-000000-s-0000: it has answers, but no input: 'a1'|1 row without answer: 'a1')"),
])
def test_a_misplaced_answer_fails_by_name(inputs: Path, tamper: Any, message: str) -> None:
    """After routing, an answer that is in another unit, twice or nowhere stops the run by unit and id."""
    with pytest.raises(RuntimeError, match=message):
        run(inputs, tamper_placed=tamper)
    assert not (inputs / "out" / "_SUCCESS").exists()


def test_positions_that_contradict_the_manifest_fail_by_name() -> None:
    """The order comes from row numbers, the proof from the manifest: if they disagree, the rows are named."""
    unit = OutputUnit("file:///a.parquet", 0, 0)
    keys = [RowKey(text, "d") for text in "xyz"]
    manifest = Manifest(unit=unit, keys=tuple(key.text for key in keys), digest="")
    rows = {"x": 0, "y": 2, "z": 1}
    places = [PlacedAnswer(row=rows[key.uuid], rank=0, occurrence=0, answers=(outcome(key),)) for key in keys]
    with pytest.raises(PublishError, match="2 rows out of order: 'z' stands where 'y' belongs, 'y' stands"):
        restore_order(manifest, places)


def test_equal_rows_are_told_apart_by_rank() -> None:
    """Rows of equal key stand in the order of their rank; two of one rank are an error."""
    unit = OutputUnit("file:///a.parquet", 0, 0)
    key = RowKey("x", "d")
    manifest = Manifest(unit=unit, keys=(key.text, key.text), digest="")
    first, second = (PlacedAnswer(row=rank, rank=rank, occurrence=rank, answers=(outcome(key),)) for rank in (0, 1))
    assert restore_order(manifest, [second, first]) == [first, second]
    with pytest.raises(PublishError, match="1 row without answer: 'x'"):
        restore_order(manifest, [first, first])
