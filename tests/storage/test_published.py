"""Frozen columns, and the files of a unit."""

from __future__ import annotations

import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen_beam.errors import ErrorCode
from batchgen_beam.records import (
    Failure,
    OutputUnit,
    RowKey,
    SamplingParams,
    TokenLogprobs,
    float_array,
    token_array,
)
from batchgen_beam.storage.published import (
    PublishedUnit,
    failures_table,
    is_published,
    publish_unit,
    published_names,
    remove_published,
    results_table,
    set_aside,
    stale_folder,
)
from batchgen_beam.storage.schemas import FAILURE_SCHEMA, RESULT_SCHEMA
from batchgen_beam.storage.units import PlacedAnswer, published_name
from tests.support.storing import outcome

UNIT = OutputUnit("file:///in/a.parquet", 2, 1)

RESULTS = """
uuid: string not null
occurrence: int32 not null
choice_index: int32 not null
text: string
token_ids: list<item: int32> not null
finish_reason: string not null
stop_reason: string
prompt_tokens: int32 not null
cached_tokens: int32 not null
completion_tokens: int32 not null
logprobs: list<item: struct<logprob: float, top: list<item: struct<token_id: int32 not null, logprob: float>>>> not null
temperature: double not null
top_k: int32 not null
top_p: double not null
max_tokens: int32
seed: int64 not null
model: string not null
content_print: string not null
numeric_print: string not null
shard: string not null
row_group: int32 not null
row: int64 not null
queue_seconds: double not null
generate_seconds: double not null
"""

FAILURES = """
uuid: string not null
occurrence: int32 not null
code: string not null
message: string not null
prompt_head: string not null
shard: string not null
row_group: int32 not null
row: int64 not null
"""


def lines(schema: pa.Schema) -> list[str]:
    """One line a column."""
    return [f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in schema]


def placed(index: int, *answers: object, occurrence: int = 0) -> PlacedAnswer:
    """A place for answers."""
    return PlacedAnswer(row=index, rank=0, occurrence=occurrence, answers=answers)  # type: ignore[arg-type]


def unit_of(*places: PlacedAnswer, kept: bytes = b"") -> PublishedUnit:
    """A unit of the fake model."""
    return PublishedUnit(unit=UNIT, model="fake", placed=places, kept=kept)


def failure(index: int) -> Failure:
    """A failed row."""
    return Failure(key=RowKey(f"id-{index}", "d"), code=ErrorCode.EMPTY_PROMPT, message="m\ud800", prompt_head="h")


def test_result_columns_are_frozen() -> None:
    """Names, types and order of result columns are a contract with whoever reads them."""
    assert lines(RESULT_SCHEMA) == RESULTS.split("\n")[1:-1]


def test_failure_columns_are_frozen() -> None:
    """Names, types and order of failure columns are a contract with whoever reads them."""
    assert lines(FAILURE_SCHEMA) == FAILURES.split("\n")[1:-1]


def test_every_value_finds_its_column() -> None:
    """A result row says what the outcome says, and where the row stood."""
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.25, seed=2**64 - 1, max_tokens=9)
    answer = outcome(RowKey("id", "d"), choice_index=1, token_ids=token_array([5, 6]), stop_reason=6, prompt_tokens=11,
                     cached_tokens=4, params=params, queue_seconds=1.5, generate_seconds=2.5, text="x\ud800",
                     logprobs=TokenLogprobs(width=1, chosen=float_array([-0.5, -math.inf]), top_ids=token_array([5, 7]),
                                            top=float_array([-0.5, math.nan])))
    assert results_table(unit_of(placed(8, answer, occurrence=3))).to_pylist() == [{
        "uuid": "id", "occurrence": 3, "choice_index": 1, "text": "x\\ud800", "token_ids": [5, 6],
        "finish_reason": "stop", "stop_reason": "6", "prompt_tokens": 11, "cached_tokens": 4, "completion_tokens": 2,
        "logprobs": [{"logprob": -0.5, "top": [{"token_id": 5, "logprob": -0.5}]},
                     {"logprob": None, "top": [{"token_id": 7, "logprob": None}]}],
        "temperature": 0.5, "top_k": 3, "top_p": 0.25, "max_tokens": 9, "seed": -1, "model": "fake",
        "content_print": "content", "numeric_print": "numeric", "shard": "file:///in/a.parquet", "row_group": 2,
        "row": 8, "queue_seconds": 1.5, "generate_seconds": 2.5}]
    assert failures_table(unit_of(placed(4, failure(4), occurrence=1))).to_pylist() == [{
        "uuid": "id-4", "occurrence": 1, "code": "EMPTY_PROMPT", "message": "m\\ud800", "prompt_head": "h",
        "shard": "file:///in/a.parquet", "row_group": 2, "row": 4}]


def test_kept_columns_follow_their_rows() -> None:
    """Kept columns come last, with their own types, and skip the rows that failed."""
    table = pa.table({"k": pa.array([10, 11, 12], pa.int16()), "s": [["a"], None, ["c"]]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    answers = [outcome(RowKey(f"id-{index}", "d")) for index in range(3)]
    unit = unit_of(placed(0, answers[0]), placed(1, failure(1)), placed(2, answers[2]),
                   kept=sink.getvalue().to_pybytes())
    results = results_table(unit)
    assert results.schema.names == [*RESULT_SCHEMA.names, "k", "s"]
    assert results.schema.field("k").type == pa.int16()
    assert results.select(["uuid", "k", "s"]).to_pylist() == [
        {"uuid": "id-0", "k": 10, "s": ["a"]}, {"uuid": "id-2", "k": 12, "s": ["c"]}]


def test_files_without_rows_do_not_exist(tmp_path: Path) -> None:
    """A unit's results or failures file of an earlier run goes when there is nothing left to say."""
    output = str(tmp_path)
    good, bad = unit_of(placed(0, outcome(RowKey("id-0", "d")))), unit_of(placed(0, failure(0)))
    name = "in/a.parquet/rg-000002-s-0001.parquet"
    publish_unit(output, good)
    assert found(tmp_path) == [f"results/{name}"]
    publish_unit(output, bad)
    assert found(tmp_path) == [f"failures/{name}"]
    publish_unit(output, good)
    assert found(tmp_path) == [f"results/{name}"]
    assert pq.read_schema(tmp_path / "results" / name).equals(RESULT_SCHEMA)


def test_removing_published_leaves_the_rest(tmp_path: Path) -> None:
    """Only published units are removed."""
    publish_unit(str(tmp_path), unit_of(placed(0, outcome(RowKey("id-0", "d"))), placed(1, failure(1))))
    for name in ("notes.parquet", "results/mine.parquet"):
        (tmp_path / name).touch()
    assert remove_published(str(tmp_path)) == 2
    assert found(tmp_path) == ["notes.parquet", "results/mine.parquet"]


def test_a_unit_is_set_aside_whole(tmp_path: Path) -> None:
    """Both files of a unit move to the run's stale folder under the same names; again changes nothing."""
    output, name = str(tmp_path), published_name(UNIT)
    publish_unit(output, unit_of(placed(0, outcome(RowKey("id-0", "d"))), placed(1, failure(1))))
    assert published_names(output) == [name]
    for _ in range(2):
        assert is_published(output, name) == (_ == 0)
        set_aside(output, "r", name)
        assert found(tmp_path) == [f"_stale/r/failures/{name}", f"_stale/r/results/{name}"]
    assert published_names(output) == []
    assert published_names(stale_folder(output, "r")) == [name]


def found(folder: Path) -> list[str]:
    """Every file below the folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
