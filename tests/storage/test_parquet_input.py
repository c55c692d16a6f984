"""Parquet shards as rows."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen_beam.errors import InputError
from batchgen_beam.settings import InputColumns
from batchgen_beam.storage.inputs import plan_input
from batchgen_beam.storage.parquet_input import read_footer, read_row_group
from tests.support.storing import read_all, write_table


def test_values_have_canonical_names_and_no_nulls(tmp_path: Path) -> None:
    """Named columns arrive under canonical names, parameters under their own, nulls and other columns not at all."""
    path = write_table(tmp_path / "a.parquet", {
        "key": ["x", "y"], "question": ["q1", None], "temperature": [None, 0.5], "stop": ["END", None],
        "other": [1, 2]})
    rows, _, _ = read_all(path, InputColumns(id="key", prompt="question"))
    assert [(row.key.uuid, dict(row.values)) for row in rows] == [
        ("x", {"prompt": "q1", "stop": "END"}), ("y", {"temperature": 0.5})]


def test_ignored_columns_are_not_parameters(tmp_path: Path) -> None:
    """A column in `ignore` is no parameter, whatever its name, and does not change the key."""
    path = write_table(tmp_path / "a.parquet", {"uuid": ["x"], "prompt": ["p"], "n": [3]})
    seen, _, _ = read_all(path)
    ignored, _, _ = read_all(path, InputColumns(ignore=("n",)))
    assert seen[0].values == {"prompt": "p", "n": 3}
    assert ignored[0].values == {"prompt": "p"}
    assert seen[0].key != ignored[0].key


@pytest.mark.parametrize("kind", [
    pa.list_(pa.struct([("role", pa.string()), ("content", pa.string()), ("name", pa.string())])),
    pa.large_list(pa.struct([("content", pa.large_string()), ("role", pa.string())])),
    pa.list_(pa.map_(pa.string(), pa.string())),
])
def test_messages_of_every_arrow_shape_are_alike(tmp_path: Path, kind: pa.DataType) -> None:
    """Lists of structs (null fields left out) and of maps give the same turns and the same key."""
    turns = [{"role": "user", "content": "hi"}]
    column = pa.array([[list(turns[0].items())]] if pa.types.is_map(kind.value_type) else [turns], kind)
    rows, _, _ = read_all(write_table(tmp_path / "a.parquet", {"uuid": ["x"], "messages": column}))
    plain, _, _ = read_all(write_table(tmp_path / "b.parquet", {"uuid": ["x"], "messages": [turns]}))
    assert rows[0].values == {"messages": turns}
    assert rows[0].key == plain[0].key


@pytest.mark.parametrize("ids", [
    pa.array(["7", "8"], pa.string()), pa.array([7, 8], pa.int8()), pa.array([7, 8], pa.uint64()),
    pa.array(["7", "8"], pa.large_string()), pa.array(["7", "8"]).dictionary_encode(),
])
def test_id_columns_of_every_type(tmp_path: Path, ids: pa.Array) -> None:
    """Text and integer ids of every width are the same ids."""
    rows, _, _ = read_all(write_table(tmp_path / "a.parquet", {"uuid": ids, "prompt": ["p", "p"]}))
    assert [row.key.uuid for row in rows] == ["7", "8"]


def test_uuid_columns_identify(tmp_path: Path) -> None:
    """A column of Arrow's UUID type gives the usual text."""
    value = uuid.UUID(int=77)
    column = pa.array([value.bytes], pa.uuid())
    rows, _, _ = read_all(write_table(tmp_path / "a.parquet", {"uuid": column, "prompt": ["p"]}))
    assert rows[0].key.uuid == str(value)


@pytest.mark.parametrize(("columns", "names", "message"), [
    ({"text": ["x"]}, InputColumns(), r"none of the columns 'prompt', 'messages', 'token_ids'.*'text'"),
    ({"prompt": ["x"], "uuid": [1.0]}, InputColumns(), r"'uuid' of type double"),
    ({"prompt": ["x"]}, InputColumns(id="key"), r"no column 'key'"),
    ({"prompt": ["x"]}, InputColumns(keep=("note",)), r"no input file has the column 'note'"),
])
def test_unsuitable_columns_are_named(tmp_path: Path, columns: dict[str, Any], names: InputColumns,
                                      message: str) -> None:
    """A file whose columns can't be used is refused before anything runs, with the columns by name."""
    path = write_table(tmp_path / "a.parquet", columns)
    with pytest.raises(InputError, match=message):
        plan_input([str(path)], names)


def test_doubled_columns_are_refused(tmp_path: Path) -> None:
    """Two columns of one needed name are an error, not a guess."""
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match="more than one column named 'prompt'"):
        read_footer(f"file://{tmp_path}/a.parquet", InputColumns())


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not parquet at all, but long enough to have a tail"])
def test_what_is_no_parquet_is_named(tmp_path: Path, content: bytes) -> None:
    """A broken file is refused by name."""
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"a\.parquet can't be read as Parquet"):
        plan_input([str(path)], InputColumns())


def test_bytes_that_are_no_text_stay_with_their_row(tmp_path: Path) -> None:
    """Invalid UTF-8 becomes lone surrogates in its own row, at any depth; other rows are as they were."""
    bad = _unchecked([b"ok", b"\xff\xfe", None])
    turns = pa.ListArray.from_arrays([0, 1, 2, 2], pa.StructArray.from_arrays(
        [_unchecked([b"user", b"user"]), _unchecked([b"hi", b"\xff"])], ["role", "content"]))
    path = write_table(tmp_path / "a.parquet", {"uuid": ["a", "b", "c"], "prompt": bad, "messages": turns})
    rows, _, _ = read_all(path)
    assert [row.values.get("prompt") for row in rows] == ["ok", "\udcff\udcfe", None]
    assert [row.values["messages"] for row in rows] == [
        [{"role": "user", "content": "hi"}], [{"role": "user", "content": "\udcff"}], []]


def _unchecked(values: list[bytes | None]) -> pa.Array:
    """A string array whose bytes nobody validated, as another writer could leave it."""
    binary = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(binary), binary.buffers(), binary.null_count)


def test_only_needed_columns_are_measured(tmp_path: Path) -> None:
    """The bytes of a row group are those of the columns that are read."""
    path = write_table(tmp_path / "a.parquet", {
        "prompt": [f"{index}" for index in range(100)], "blob": ["x" * 1000 + str(index) for index in range(100)]})
    small = read_footer(f"file://{path}", InputColumns()).needed_bytes[0]
    large = read_footer(f"file://{path}", InputColumns(keep=("blob",))).needed_bytes[0]
    assert small < 5_000
    assert large > 100_000


def test_batches_are_small_where_rows_are_large(tmp_path: Path) -> None:
    """A batch holds about 16 MiB at most, however many rows that is."""
    path = write_table(tmp_path / "a.parquet", {"prompt": [f"{index} " * 500_000 for index in range(10, 34)]})
    sizes = [len(batch.rows) for batch in read_row_group(f"file://{path}", 0, InputColumns(), pa.schema([]))]
    assert sum(sizes) == 24
    assert max(sizes) <= 12
