"""Faults about ids, files, schemas and the place of an answer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen_beam.errors import ErrorCode
from batchgen_beam.records import Failure, InputRow, OutputUnit, RowKey, TokenLogprobs, float_array, token_array
from batchgen_beam.settings import InputColumns
from batchgen_beam.storage.inputs import plan_input, read_task
from batchgen_beam.storage.published import PublishedUnit, results_table
from batchgen_beam.storage.schemas import RESULT_SCHEMA
from batchgen_beam.storage.units import PlacedAnswer
from tests.support.jobs import published
from tests.support.storing import Keyed, outcome, read_all, run_storage, write_lines, write_table

TEXT_TYPES = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]


def text_array(values: list[str | None], kind: pa.DataType) -> pa.Array:
    """A text column of the given type."""
    plain = pa.array(values, pa.string())
    return plain.dictionary_encode() if pa.types.is_dictionary(kind) else plain.cast(kind)


def test_duplicate_ids_are_answered_and_reported(tmp_path: Path) -> None:
    """Case 15, B4: rows that share an id are different rows, inside a file and across files; all are answered."""
    write_table(tmp_path / "a.parquet", {"uuid": ["x", "x", "y", "x"], "prompt": ["1", "2", "3", "1"]})
    write_table(tmp_path / "b.parquet", {"uuid": ["x", "z"], "prompt": ["4", "5"]})
    counts = run_storage([tmp_path / "*.parquet"], tmp_path / "out")
    assert [(row["uuid"], row["occurrence"], row["text"]) for row in published(tmp_path / "out")] == [
        ("x", 0, "re: 1"), ("x", 1, "re: 2"), ("y", 0, "re: 3"), ("x", 2, "re: 1"),
        ("x", 0, "re: 4"), ("z", 0, "re: 5")]
    assert (counts["rows"], counts["results"]) == (6, 6)
    assert (counts["repeated_ids"], counts["repeated_id_rows"]) == (1, 4)


def test_a_missing_column_is_null(tmp_path: Path) -> None:
    """Case 48: a column that a file lacks, or holds only nulls of, reads as null in every row of it."""
    write_table(tmp_path / "a.parquet", {"uuid": ["a"], "prompt": ["p"], "temperature": [0.5], "note": ["n"]})
    write_table(tmp_path / "b.parquet", {"uuid": ["b"], "prompt": ["p"]})
    write_table(tmp_path / "c.parquet", {"uuid": ["c"], "prompt": ["p"], "temperature": pa.nulls(1),
                                         "note": pa.nulls(1)})
    rows, _, _ = read_all(tmp_path / "*.parquet")
    assert [dict(row.values) for row in rows] == [{"prompt": "p", "temperature": 0.5}, {"prompt": "p"}, {"prompt": "p"}]
    run_storage([tmp_path / "*.parquet"], tmp_path / "out", columns=InputColumns(keep=("note",)))
    assert [row["note"] for row in published(tmp_path / "out")] == ["n", None, None]


def all_failed(row: InputRow) -> Keyed:
    """No row has an answer."""
    return row.key.text, Failure(key=row.key, code=ErrorCode.EMPTY_PROMPT, message="the prompt has no token")


def test_shards_of_nulls_are_written(tmp_path: Path) -> None:
    """Case 48: results whose nullable columns are all null have the same schema as any others."""
    answer = outcome(RowKey("x", "d"), text=None, token_ids=token_array(), logprobs=TokenLogprobs(), stop_reason=None)
    unit = OutputUnit("file:///a.parquet", 0, 0)
    table = results_table(PublishedUnit(
        unit=unit, model="m", placed=[PlacedAnswer(row=0, rank=0, occurrence=0, answers=(answer,))]))
    pq.write_table(table, tmp_path / "x.parquet")
    assert pq.read_schema(tmp_path / "x.parquet").equals(RESULT_SCHEMA)
    assert pq.read_table(tmp_path / "x.parquet").column("text").to_pylist() == [None]


@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
def test_text_types_are_alike(tmp_path: Path, kind: pa.DataType) -> None:
    """Case 49: string, large_string, string_view and dictionary columns give equal values, keys and ids."""
    values = {"uuid": ["a", "b", None], "prompt": ["p", None, "p"], "messages": [None, "[]", None]}
    plain, _, _ = read_all(write_table(tmp_path / "plain.parquet", values))
    typed, _, _ = read_all(write_table(tmp_path / "typed.parquet", {
        name: text_array(column, kind) for name, column in values.items()}))
    assert [row.values for row in typed] == [row.values for row in plain]
    assert [row.key for row in typed[:2]] == [row.key for row in plain[:2]]
    assert typed[2].problem == plain[2].problem == "column 'uuid' is null, it must identify the row"


def test_shards_of_mixed_types_concatenate(tmp_path: Path) -> None:
    """Case 49: however each input shard types a column, all results have one schema and read as one table."""
    for number, kind in enumerate([*TEXT_TYPES, pa.null()]):
        column = pa.nulls(1) if pa.types.is_null(kind) else text_array(["n"], kind)
        write_table(tmp_path / f"{number}.parquet", {"uuid": [f"{number}"], "prompt": ["p"], "note": column})
    run_storage([tmp_path / "*.parquet"], tmp_path / "out", columns=InputColumns(keep=("note",)))
    files = sorted((tmp_path / "out" / "results").rglob("rg-*.parquet"))
    assert len({pq.read_schema(file).to_string() for file in files}) == 1
    assert pq.read_table(tmp_path / "out" / "results").num_rows == 5
    assert [row["note"] for row in published(tmp_path / "out")] == ["n", "n", "n", "n", None]


def test_messages_are_alike_in_parquet_and_json(tmp_path: Path) -> None:
    """Case 49: the same turns from list<struct> and from JSON Lines are the same question."""
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "Grüße 🎉"}]
    arrow, _, _ = read_all(write_table(tmp_path / "a.parquet", {"uuid": ["x"], "messages": [turns]}))
    lines, _, _ = read_all(write_lines(tmp_path / "b.jsonl", [{"uuid": "x", "messages": turns}]))
    assert arrow[0].values == lines[0].values
    assert arrow[0].key == lines[0].key


def test_memory_does_not_follow_the_row_group(tmp_path: Path) -> None:
    """Case 51: a row group of 96 MiB is read within a fraction of that, its unneeded columns not at all."""
    path = tmp_path / "a.parquet"
    with pq.ParquetWriter(path, pa.schema([("prompt", pa.string()), ("blob", pa.string())]), compression="none",
                          use_dictionary=False) as writer:
        rows = range(48 * 1024)
        writer.write_table(pa.table({
            "prompt": [f"{row:0>1024}" for row in rows], "blob": [f"{row:1>1024}" for row in rows]}))
    plan = plan_input([str(path)], InputColumns(), row_group_bytes=1 << 20)
    (task,) = plan.files[0].tasks()
    pool = pa.default_memory_pool()
    before, most, read = pool.bytes_allocated(), 0, 0
    for batch in read_task(task, InputColumns(), plan.kept):
        most = max(most, pool.bytes_allocated() - before)
        read += len(batch.rows)
    assert read == len(rows)
    assert most < 16 << 20


def test_large_row_groups_draw_a_warning(tmp_path: Path) -> None:
    """Case 51: a row group above the limit is named before the run, with its rows, its size and the remedy."""
    path = write_table(tmp_path / "a.parquet", {"prompt": [f"{row:0>900}" for row in range(3000)]}, row_group_size=2000)
    (warning,) = plan_input([str(path)], InputColumns(), row_group_bytes=1 << 20).warnings
    assert "a.parquet: row group 0 holds 2000 rows and 1 MiB" in warning
    assert "Smaller row groups" in warning
    assert plan_input([str(path)], InputColumns()).warnings == ()


def some_failed(row: InputRow) -> Keyed:
    """Rows that ask nothing fail."""
    return all_failed(row) if not row.values.get("prompt") else (row.key.text, outcome(row.key))


def test_failed_rows_are_rows(tmp_path: Path) -> None:
    """Case 53: a failed row is published with its code and place, and is never counted as answered."""
    write_table(tmp_path / "a.parquet", {"uuid": ["a", "b", "c"], "prompt": ["p", "", "p"]})
    counts = run_storage([tmp_path / "a.parquet"], tmp_path / "out", answer=some_failed)
    assert [row["uuid"] for row in published(tmp_path / "out")] == ["a", "c"]
    (failed,) = published(tmp_path / "out", "failures")
    assert (failed["uuid"], failed["code"], failed["row"]) == ("b", "EMPTY_PROMPT", 1)
    assert (counts["rows"], counts["results"], counts["failures"]) == (3, 2, {"EMPTY_PROMPT": 1})


def test_a_unit_of_failures_only_has_no_results(tmp_path: Path) -> None:
    """Case 53: where every row failed there is no empty results file, and the run still ends with all counted."""
    write_table(tmp_path / "a.parquet", {"prompt": ["p", "q"]})
    counts = run_storage([tmp_path / "a.parquet"], tmp_path / "out", answer=all_failed)
    assert not (tmp_path / "out" / "results").exists()
    assert len(published(tmp_path / "out", "failures")) == counts["failed"] == 2


def reversed_by_length(keyed: Keyed) -> Iterator[Keyed]:
    """Hold every answer back; the last row releases them, longest prompt first."""
    HELD.append(keyed)
    if len(HELD) == 30:
        yield from sorted(HELD, key=_length, reverse=True)
        HELD.clear()


HELD: list[Keyed] = []


def _length(keyed: Keyed) -> int:
    return len(getattr(keyed[1], "text", ""))


def test_answers_stay_with_their_prompts(tmp_path: Path) -> None:
    """Case 59: rows that finish in the reverse of their order, over two files, are joined to their own prompts."""
    for name in "ab":
        write_table(tmp_path / f"{name}.parquet", {"uuid": [f"{name}{index}" for index in range(15)],
                                                   "prompt": [f"{name}{index}" * index for index in range(15)]})
    run_storage([tmp_path / "*.parquet"], tmp_path / "out", unit_rows=4, tamper=reversed_by_length)
    assert [(row["uuid"], row["text"]) for row in published(tmp_path / "out")] == [
        (f"{name}{index}", "re: " + f"{name}{index}" * index)
        for name in "ab" for index in range(15)]


def test_log_probabilities_that_are_not_finite_are_null() -> None:
    """Case 31: -inf, inf and nan become null, so that results can be written as JSON; all else stays to the bit."""
    values = [-0.1, -math.inf, math.nan, math.inf, -1e-45]
    answer = outcome(RowKey("x", "d"), token_ids=token_array(range(5)), logprobs=TokenLogprobs(
        width=1, chosen=float_array(values), top_ids=token_array(range(5)), top=float_array(values)))
    unit = OutputUnit("file:///a.parquet", 0, 0)
    place = PlacedAnswer(row=0, rank=0, occurrence=0, answers=(answer,))
    (row,) = results_table(PublishedUnit(unit=unit, model="m", placed=[place])).to_pylist()
    found: list[Any] = [entry["logprob"] for entry in row["logprobs"]]
    assert found == [float_array([-0.1])[0], None, None, None, float_array([-1e-45])[0]]
    assert [entry["top"][0]["logprob"] for entry in row["logprobs"]] == found
    json.dumps(row, allow_nan=False)


def test_a_bad_line_is_one_failure(tmp_path: Path) -> None:
    """B5: a line that does not parse fails alone, with its line number; every other row is answered."""
    good = {"uuid": "a", "prompt": "1"}, {"uuid": "c", "prompt": "3"}
    path = write_lines(tmp_path / "a.jsonl", [good[0], '{"prompt": ', good[1]])
    counts = run_storage([path], tmp_path / "out")
    assert [(row["uuid"], row["row"], row["text"]) for row in published(tmp_path / "out")] == [
        ("a", 0, "re: 1"), ("c", 2, "re: 3")]
    (failed,) = published(tmp_path / "out", "failures")
    assert (failed["code"], failed["row"]) == ("INVALID_ROW", 1)
    assert failed["message"].startswith("line 2 is not valid JSON")
    assert (counts["rows"], counts["results"], counts["failed"]) == (3, 2, 1)
