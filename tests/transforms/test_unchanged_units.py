"""Units that a run leaves as they are, on the real reading and publishing steps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from apache_beam.pvalue import TaggedOutput

from batchgen_beam.errors import ErrorCode, PublishError
from batchgen_beam.records import Failure, InputRow
from batchgen_beam.settings import InputColumns
from batchgen_beam.storage.inputs import plan_input
from batchgen_beam.storage.unit_records import UnitRecords, recorded_names
from batchgen_beam.transforms.finish import FOUND, IN_RUN, SetAside
from batchgen_beam.transforms.read import ReadRowGroup, Reuse
from tests.support.jobs import published
from tests.support.storing import Keyed, answer_row, outcome, run_storage, write_lines, write_table

COUNT = 10


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Two files of 10 rows, in units of 4."""
    for name in "ab":
        write_file(tmp_path, name, [f"p {index}" for index in range(COUNT)])
    return tmp_path


def write_file(folder: Path, name: str, prompts: Sequence[str]) -> None:
    """A file of rows with these prompts."""
    write_table(folder / f"{name}.parquet", {
        "uuid": [f"{name}{index}" for index in range(len(prompts))], "prompt": list(prompts),
        "note": [f"n {index}" for index in range(len(prompts))]})


def run(inputs: Path, number: int, **options: Any) -> dict[str, Any]:
    """One run over all files."""
    given = {"pattern": "*.parquet", "reuse": True, "unit_rows": 4, **options}
    return run_storage([inputs / given.pop("pattern")], inputs / "out", run=f"run-{number}", **given)


def answer_again(row: InputRow) -> Keyed:
    """Another answer than at first."""
    return row.key.text, outcome(row.key, text="again")


def again(inputs: Path) -> list[str]:
    """Ids of the rows that were answered the second time."""
    return [row["uuid"] for row in published(inputs / "out") if row["text"] == "again"]


def times(inputs: Path) -> dict[str, int]:
    """When each file of a unit was written."""
    found = {}
    for path in (inputs / "out").rglob("rg-*"):
        if "_stale" not in path.parts:
            found[str(path.relative_to(inputs / "out"))] = path.stat().st_mtime_ns
    return found


def test_an_unchanged_input_writes_no_unit(inputs: Path) -> None:
    """Every unit stays, with its record; the counts are those of the first run, and say that all was skipped."""
    first = run(inputs, 1)
    before = times(inputs)
    second = run(inputs, 2, answer=answer_again)
    assert times(inputs) == before
    assert len(before) == 12
    assert again(inputs) == []
    assert (first["skipped_units"], first["skipped_rows"]) == (0, 0)
    assert second == {**first, "skipped_units": 6, "skipped_rows": 20}


def test_only_the_unit_of_an_edited_row_is_read_for_answers(inputs: Path) -> None:
    """One prompt of the second unit of a file is edited: the rows of that unit are answered again, no others."""
    run(inputs, 1)
    before = times(inputs)
    write_file(inputs, "a", [f"p {index}" if index != 6 else "edited" for index in range(COUNT)])
    counts = run(inputs, 2, answer=answer_again)
    assert again(inputs) == ["a4", "a5", "a6", "a7"]
    assert (counts["rows"], counts["results"], counts["skipped_units"], counts["skipped_rows"]) == (20, 20, 5, 16)
    changed = {name for name, time in times(inputs).items() if before[name] != time}
    assert {name.rpartition("/")[2].partition(".")[0] for name in changed} == {"rg-000000-s-0001"}
    assert len(changed) == 2


def test_kept_columns_are_part_of_a_unit(inputs: Path) -> None:
    """Columns to keep that were not kept before mean new files, and the second time none."""
    run(inputs, 1)
    columns = InputColumns(keep=("note",))
    assert run(inputs, 2, columns=columns)["skipped_units"] == 0
    assert run(inputs, 3, columns=columns)["skipped_units"] == 6
    assert [row["note"] for row in published(inputs / "out")] == 2 * [f"n {index}" for index in range(COUNT)]


def test_a_missing_file_is_published_again(inputs: Path) -> None:
    """Whoever deletes a unit's file gets it back."""
    run(inputs, 1)
    victim = next(path for path in (inputs / "out" / "results").rglob("rg-*-0002.parquet"))
    victim.unlink()
    counts = run(inputs, 2, answer=answer_again)
    assert len(again(inputs)) == counts["rows"] - counts["skipped_rows"] == 2
    assert victim.exists()


def test_a_unit_without_record_is_published_again(inputs: Path) -> None:
    """A run that was killed between a unit's files and its record has not published it."""
    run(inputs, 1)
    for path in (inputs / "out" / "_units").rglob("*-0000.parquet.json"):
        path.unlink()
    assert run(inputs, 2, answer=answer_again)["skipped_units"] == 4
    assert again(inputs) == [f"{name}{index}" for name in "ab" for index in range(4)]


def fail_some(row: InputRow) -> Keyed:
    """Row a1 meets a full machine, row b9 a template that fails."""
    codes = {"a1": ErrorCode.CAPACITY_EXCEEDED, "b9": ErrorCode.TEMPLATE_ERROR}
    if row.key.uuid in codes:
        return row.key.text, Failure(key=row.key, code=codes[row.key.uuid], message="m")
    return answer_row(row)


def test_failures_that_may_pass_are_tried_again(inputs: Path) -> None:
    """A unit with a transient failure is read again; one with a final failure only if its code is named."""
    assert run(inputs, 1, answer=fail_some)["failures"] == {"CAPACITY_EXCEEDED": 1, "TEMPLATE_ERROR": 1}
    counts = run(inputs, 2, answer=answer_again)
    assert (counts["failures"], counts["skipped_units"]) == ({"TEMPLATE_ERROR": 1}, 5)
    assert again(inputs) == ["a0", "a1", "a2", "a3"]
    counts = run(inputs, 3, answer=answer_again, retry=frozenset({ErrorCode.TEMPLATE_ERROR}))
    assert (counts["failures"], counts["skipped_units"]) == ({}, 5)
    assert again(inputs)[-2:] == ["b8", "b9"]


def test_ids_of_skipped_rows_are_counted_too(inputs: Path) -> None:
    """An id that occurs in a new file and in a unit that stays is a repeated id."""
    run(inputs, 1)
    write_table(inputs / "c.parquet", {"uuid": ["a0", "c"], "prompt": ["x", "y"]})
    counts = run(inputs, 2)
    assert (counts["skipped_units"], counts["repeated_ids"], counts["repeated_id_rows"]) == (6, 1, 2)


def test_lines_are_skipped_by_what_was_published(tmp_path: Path) -> None:
    """A JSONL file, whose rows nobody has counted: lines that are appended cost the last unit and new ones."""
    lines = [{"uuid": f"l{index}", "prompt": f"p {index}"} for index in range(14)]
    write_lines(tmp_path / "l.jsonl", lines[:10])
    run(tmp_path, 1, pattern="*.jsonl")
    write_lines(tmp_path / "l.jsonl", lines)
    counts = run(tmp_path, 2, pattern="*.jsonl", answer=answer_again)
    assert (counts["rows"], counts["skipped_units"]) == (14, 2)
    assert again(tmp_path) == [f"l{index}" for index in range(8, 14)]


def test_what_another_run_published_meanwhile_is_left(inputs: Path) -> None:
    """A run that has read all rows, and finds their units published when it comes to that, leaves them as they are."""
    run(inputs, 1)
    before = times(inputs)
    counts = run(inputs, 2, reuse=False)
    assert times(inputs) == before
    assert (counts["results"], counts["skipped_units"]) == (20, 0)


def test_a_run_does_not_skip_what_it_has_published_itself(inputs: Path) -> None:
    """A runner may do the reading again when units are published: the same rows come, and no file is written twice."""
    first = run(inputs, 1)
    before = times(inputs)
    assert run(inputs, 1) == first
    assert times(inputs) == before


def test_a_unit_that_leaves_the_input_loses_its_record(inputs: Path) -> None:
    """Its files are set aside; when the input comes back, the unit is published anew."""
    run(inputs, 1)
    (inputs / "b.parquet").rename(inputs / "b.gone")
    counts = run(inputs, 2)
    assert (counts["stale_units"], counts["skipped_units"], len(recorded_names(str(inputs / "out")))) == (3, 3, 3)
    (inputs / "b.gone").rename(inputs / "b.parquet")
    counts = run(inputs, 3)
    assert (counts["stale_units"], counts["skipped_units"], counts["results"]) == (0, 3, 20)


def test_a_run_that_finds_units_of_other_content_stops(inputs: Path) -> None:
    """Two runs at once under different content: the second to finish names a unit that the other has replaced."""
    run(inputs, 1)
    name = recorded_names(str(inputs / "out"))[0]
    mine = SetAside(str(inputs / "out"), "run-1", "content")
    assert list(mine.process((name, [IN_RUN, FOUND]))) == []
    run(inputs, 2, content="other")
    with pytest.raises(PublishError, match=rf"unit {name} .* holds answers of run run-2 under other content"):
        list(mine.process((name, [IN_RUN, FOUND])))


def test_a_skipped_row_group_is_read_once(inputs: Path) -> None:
    """Once the last unit is known to stay, the file is not opened again: it may be gone."""
    run(inputs, 1)
    plan = plan_input([str(inputs / "a.parquet")], InputColumns())
    records = UnitRecords(output=str(inputs / "out"), content="content", model="fake", run="run-2")
    step = ReadRowGroup(plan, InputColumns(), 4, Reuse(records))
    step.setup()
    [task] = plan.files[0].tasks()
    found = []
    for item in step.process(task):
        assert isinstance(item, TaggedOutput)
        found.append(item.tag)
        if found.count("skipped") == 3:
            (inputs / "a.parquet").unlink(missing_ok=True)
    assert len(found) == 3 + COUNT


def test_records_are_written_after_files(inputs: Path) -> None:
    """A record that stands means that its files do: it is never older than they are."""
    run(inputs, 1)
    for path in (inputs / "out" / "_units").rglob("*.json"):
        name = path.relative_to(inputs / "out" / "_units").with_suffix("")
        assert os.stat(inputs / "out" / "results" / name).st_mtime_ns <= path.stat().st_mtime_ns
