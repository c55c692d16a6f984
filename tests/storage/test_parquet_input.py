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


def test_dictionaries_with_bytes_that_are_no_text(tmp_path: Path) -> None:
    """A dictionary's text that is not UTF-8 fails its own rows only; other columns, kept ones too, are as before."""
    texts = pa.DictionaryArray.from_arrays(pa.array([0, 1, None] * 1500), _unchecked([b"ok", b"\xff"]))
    path = write_table(tmp_path / "a.parquet", {
        "prompt": texts, "seed": pa.array(range(4500), pa.int64()), "k": pa.array(range(4500), pa.duration("s"))},
        row_group_size=4500)
    rows, _, manifests = read_all(path, InputColumns(keep=("k",)))
    assert [row.values.get("prompt") for row in rows] == ["ok", "\udcff", None] * 1500
    assert [row.values["seed"] for row in rows] == list(range(4500))
    kept = pa.ipc.open_stream(manifests[0].kept).read_all().column("k")
    assert kept.cast(pa.int64()).to_pylist() == list(range(4500))
    alone = write_table(tmp_path / "b.parquet", {"prompt": texts})
    assert len(read_all(alone)[0]) == 4500


def test_plain_reading_of_dictionaries_changes_no_key(tmp_path: Path) -> None:
    """A column of texts gives the same rows as the same texts without dictionary."""
    texts = pa.array(["a", "b", None, "a"])
    plain, _, _ = read_all(write_table(tmp_path / "a.parquet", {"uuid": list("wxyz"), "prompt": texts}))
    coded, _, _ = read_all(write_table(tmp_path / "b.parquet", {"uuid": list("wxyz"),
                                                                "prompt": texts.dictionary_encode()}))
    assert plain == coded


@pytest.mark.parametrize("column", [
    pa.array([1, 1_000_000_001], pa.timestamp("ns")), pa.array([1, 2**62], pa.timestamp("us")),
    pa.array([1, 2**30], pa.date32()), pa.array([1, 2**62], pa.duration("s")),
    pa.array([1, 2], pa.timestamp("us", "Mars/Base")),
], ids=str)
@pytest.mark.parametrize("name", ["seed", "stop", "prompt"])
def test_values_that_python_cannot_hold_fail_their_row(tmp_path: Path, column: pa.Array, name: str) -> None:
    """Such a cell is a value of its row, which no column may hold, never an end of the reading."""
    columns = {"prompt": pa.array(["x", "y"]), name: column}
    rows, _, _ = read_all(write_table(tmp_path / "a.parquet", columns))
    value = rows[1].values[name]
    assert isinstance(value, bytes)
    assert value.startswith(str(column.type).encode())
    assert not isinstance(rows[0].values[name], int | str)


@pytest.mark.parametrize("kind", [pa.string(), pa.list_(pa.string()), pa.struct([("a", pa.string())]),
                                  pa.map_(pa.string(), pa.string())], ids=str)
def test_kept_bytes_that_are_no_text_are_escaped(tmp_path: Path, kind: pa.DataType) -> None:
    """Kept texts can always be read again, at any depth; what was text stays as it was, and so do nulls."""
    texts = _unchecked([b"good", b"\xff!", b"ok"])
    column = {
        pa.string(): texts,
        pa.list_(pa.string()): pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), texts),
        pa.struct([("a", pa.string())]): pa.StructArray.from_arrays([texts], ["a"]),
        pa.map_(pa.string(), pa.string()): pa.MapArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), texts, texts),
    }[kind]
    column = pa.concat_arrays([column, pa.nulls(1, kind)])
    path = write_table(tmp_path / "a.parquet", {"prompt": ["x"] * 4, "k": column})
    _, _, manifests = read_all(path, InputColumns(keep=("k",)))
    kept = pa.ipc.open_stream(manifests[0].kept).read_all().column("k")
    kept.validate(full=True)
    shape = {"struct": lambda t: {"a": t}, "list": lambda t: [t], "map": lambda t: [(t, t)]}.get(
        str(kind).partition("<")[0], str)
    assert kept.to_pylist() == [shape("good"), shape("\\udcff!"), shape("ok"), None]


def test_a_damaged_page_is_named(tmp_path: Path) -> None:
    """A row group whose data can't be read is named with its file, in one line that says what to do."""
    texts = [f"{index * 7919}" * 20 for index in range(300)]
    path = write_table(tmp_path / "a.parquet", {"prompt": texts}, row_group_size=100)
    start = pq.read_metadata(path).row_group(1).column(0).dictionary_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + 300] = b"\xaa" * 300
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"a\.parquet can't be read as Parquet in row group 1: .*write") as seen:
        read_all(path)
    assert "\n" not in str(seen.value)
    assert len(str(seen.value)) < 1000


def test_a_damaged_footer_is_named(tmp_path: Path) -> None:
    """A footer that is no footer is refused before anything runs."""
    path = write_table(tmp_path / "a.parquet", {"prompt": ["x"]})
    data = bytearray(path.read_bytes())
    data[-60:-8] = b"\xaa" * 52
    path.write_bytes(data)
    with pytest.raises(InputError, match=r"a\.parquet can't be read as Parquet: [^\n]*$"):
        plan_input([str(path)], InputColumns())


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
