"""The plan of an input, and the cutting of row groups into units."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen_beam.errors import InputError, OptionError
from batchgen_beam.records import OutputUnit
from batchgen_beam.settings import InputColumns
from batchgen_beam.storage.inputs import LINE_BYTES, pieces_over, plan_input, split_plan
from batchgen_beam.storage.kept_columns import kept_types
from batchgen_beam.storage.units import Manifest, check_distinct_paths, published_name, unit_text
from tests.support.storing import read_all, write_lines, write_table


def prompts(count: int) -> dict[str, list[str]]:
    """Columns of rows r0, r1, ..."""
    return {"uuid": [f"r{index}" for index in range(count)], "prompt": [f"p{index}" for index in range(count)]}


def test_files_are_sorted_and_counted(tmp_path: Path) -> None:
    """Several patterns give each file once, by name; hidden files and markers do not count; totals are known."""
    write_table(tmp_path / "b.parquet", prompts(5), row_group_size=2)
    write_table(tmp_path / "a.parquet", prompts(1))
    for name in ("_SUCCESS", ".a.parquet.crc"):
        (tmp_path / name).touch()
    plan = plan_input([f"{tmp_path}/*", f"{tmp_path}/b.parquet"], InputColumns())
    assert {file.uri: file.rows for file in plan.files} == {
        f"file://{tmp_path}/a.parquet": (1,), f"file://{tmp_path}/b.parquet": (2, 2, 1)}
    assert plan.rows == 6
    write_lines(tmp_path / "c.jsonl", [])
    assert plan_input([f"{tmp_path}/*"], InputColumns()).rows is None


def test_a_plan_is_split_by_row_groups_in_order(tmp_path: Path) -> None:
    """Parts have at most so many rows, except for a row group that has more; together they are the plan."""
    write_table(tmp_path / "a.parquet", prompts(25), row_group_size=10)
    write_table(tmp_path / "b.parquet", prompts(30), row_group_size=30)
    write_table(tmp_path / "c.parquet", prompts(4))
    plan = plan_input([f"{tmp_path}/*"], InputColumns())
    parts = split_plan(plan, 20)
    assert [part.rows for part in parts] == [20, 5, 30, 4]
    tasks = [task for file in plan.files for task in file.tasks()]
    assert [[task for file in part.files for task in file.tasks()] for part in parts] == [
        tasks[:2], tasks[2:3], tasks[3:4], tasks[4:]]
    assert pieces_over(plan, 20) == [(plan.files[1].uri, 30)]
    assert split_plan(plan, 1000) == [plan]
    assert split_plan(replace(plan, files=()), 10) == []


def test_lines_that_nobody_has_counted_are_split_by_bytes(tmp_path: Path) -> None:
    """A file is never split; how many rows it has is taken from its size."""
    for name in "abc":
        write_lines(tmp_path / f"{name}.jsonl", [{"prompt": "x" * LINE_BYTES}] * 10)
    parts = split_plan(plan_input([f"{tmp_path}/*"], InputColumns()), 25)
    assert [[file.uri[-7:] for file in part.files] for part in parts] == [["a.jsonl", "b.jsonl"], ["c.jsonl"]]
    assert [uri[-7:] for uri, _ in pieces_over(plan_input([f"{tmp_path}/*"], InputColumns()), 9)] == [
        "a.jsonl", "b.jsonl", "c.jsonl"]
    assert [part.rows for part in split_plan(plan_input([f"{tmp_path}/*"], InputColumns(), limit=15), 12)] == [10, 5]


@pytest.mark.parametrize(("name", "message"), [
    ("none*.parquet", r"none\*\.parquet' matches no file"), ("a.csv", r"a\.csv is neither Parquet"),
    ("folder", r"folder is neither Parquet .* folder/\*\.parquet"),
])
def test_unusable_patterns_are_named(tmp_path: Path, name: str, message: str) -> None:
    """No match, an unknown extension, a folder: refused with the name and what to do."""
    (tmp_path / "a.csv").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=message):
        plan_input([f"{tmp_path}/{name}"], InputColumns())


@pytest.mark.parametrize("name", ["x.parquet", "x.jsonl"])
def test_what_is_no_file_is_named(tmp_path: Path, name: str) -> None:
    """A folder, a pipe (which is never opened) and a broken link with the name of a shard are refused in one line."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / name).mkdir()
    os.mkfifo(tmp_path / name)
    for path, message in ((f"folder/{name}", "is a folder"), (name, "is no regular file")):
        with pytest.raises(InputError, match=f"{path} {message}") as refusal:
            plan_input([f"{tmp_path}/{path}"], InputColumns())
        assert "\n" not in str(refusal.value)


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """File names are bytes: one that is not UTF-8 could be neither an id nor a published name."""
    (tmp_path / os.fsdecode(b"\xff.jsonl")).write_text('{"prompt": "x"}')
    with pytest.raises(InputError, match=r"\\udcff\.jsonl' has a name that is not UTF-8"):
        plan_input([f"{tmp_path}/*"], InputColumns())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    """A file that may not be read is refused before anything starts."""
    write_table(tmp_path / "a.parquet", prompts(1)).chmod(0)
    with pytest.raises(InputError, match=r"a\.parquet can't be read: no permission"):
        plan_input([f"{tmp_path}/*"], InputColumns())


def test_an_unreachable_store_is_named_with_its_remedy() -> None:
    """A pattern of a scheme that nothing here can open is the user's mistake, not a crash."""
    with pytest.raises(InputError, match=r"nonsense://b/\*\.parquet can't be reached: use a local path or one of gs://"):
        plan_input(["nonsense://b/*.parquet"], InputColumns())


@pytest.mark.parametrize("limit", [1, 2, 3, 6, 7, 100])
def test_a_limit_keeps_the_first_rows(tmp_path: Path, limit: int) -> None:
    """`limit` takes rows in input order over row groups and files, JSONL among them, and reads no more."""
    write_table(tmp_path / "a.parquet", prompts(5), row_group_size=2)
    write_lines(tmp_path / "b.jsonl", [{"prompt": f"l{index}"} for index in range(2)])
    plan = plan_input([f"{tmp_path}/*"], InputColumns(), limit=limit)
    assert plan.rows == min(limit, 7)
    assert sum(task.rows or 0 for file in plan.files for task in file.tasks()) == min(limit, 7)


@pytest.mark.parametrize("keep", [("text",), ("a", "a"), ("seed",)])
def test_kept_names_must_be_free(tmp_path: Path, keep: tuple[str, ...]) -> None:
    """A kept column may not have the name of a result column, nor be named twice."""
    with pytest.raises(OptionError, match=keep[0]):
        plan_input([f"{tmp_path}/*"], InputColumns(keep=keep))


def test_kept_types_must_go_together(tmp_path: Path) -> None:
    """A kept column has one type over all files: the wider where one holds the other, refused where none does."""
    write_table(tmp_path / "a.parquet", {"prompt": ["x"], "k": pa.array([1], pa.int32())})
    write_table(tmp_path / "b.parquet", {"prompt": ["x"], "k": pa.array([1], pa.int64())})
    write_table(tmp_path / "c.parquet", {"prompt": ["x"]})
    columns = InputColumns(keep=("k",))
    assert plan_input([f"{tmp_path}/*"], columns).kept.field("k").type == pa.int64()
    write_table(tmp_path / "d.parquet", {"prompt": ["x"], "k": ["text"]})
    with pytest.raises(InputError, match=r"'k' is string in .*d\.parquet and int64 elsewhere"):
        plan_input([f"{tmp_path}/*"], columns)


@pytest.mark.parametrize(("narrow", "wide"), [
    (pa.int32(), pa.float64()), (pa.uint32(), pa.int64()), (pa.float32(), pa.float64()), (pa.int8(), pa.float32()),
    (pa.null(), pa.timestamp("s")), (pa.list_(pa.int8()), pa.list_(pa.int32())), (pa.large_string(), pa.string()),
    (pa.decimal128(5, 2), pa.decimal128(9, 3)), (pa.string(), pa.binary()),
    (pa.struct([("a", pa.int8())]), pa.struct([("a", pa.int16())])),
    (pa.dictionary(pa.int8(), pa.string()), pa.string()),
])
def test_kept_types_are_widened_where_every_value_fits(narrow: pa.DataType, wide: pa.DataType) -> None:
    """The common type does not depend on the order of the files."""
    for kinds in ((narrow, wide), (wide, narrow)):
        footers = [(f"{index}", pa.schema([("k", kind)])) for index, kind in enumerate(kinds)]
        assert kept_types(footers, ["k"]).field("k").type == wide


@pytest.mark.parametrize(("one", "other"), [
    (pa.int64(), pa.float64()), (pa.timestamp("s"), pa.timestamp("ns")), (pa.int64(), pa.uint64()),
    (pa.date32(), pa.timestamp("ns")), (pa.duration("s"), pa.duration("ns")),
    (pa.list_(pa.int64()), pa.list_(pa.float64())), (pa.struct([("a", pa.int8())]), pa.struct([("b", pa.int8())])),
])
def test_kept_types_that_lose_values_are_refused(one: pa.DataType, other: pa.DataType) -> None:
    """Types that Arrow would join, although some value of one has no place in the other, are refused by name."""
    for kinds in ((one, other), (other, one)):
        footers = [(f"{index}", pa.schema([("k", kind)])) for index, kind in enumerate(kinds)]
        with pytest.raises(InputError, match=r"kept column 'k' is .*convert one of them"):
            kept_types(footers, ["k"])


def test_input_inside_the_output_is_refused(tmp_path: Path) -> None:
    """A pattern that reaches into the output would take answers for questions; neighbours of like name may be read."""
    path = write_table(tmp_path / "out-1" / "a.parquet", {"text": ["an answer"]})
    write_table(tmp_path / "a.parquet", prompts(1))
    with pytest.raises(InputError, match=rf"{path} lies inside --output .*out-1/; choose"):
        plan_input([f"{tmp_path}/**.parquet"], InputColumns(), output=f"{tmp_path}/out-1/")
    assert plan_input([f"{tmp_path}/a.parquet"], InputColumns(), output=f"{tmp_path}/a").rows == 1


def test_units_are_slices_in_order(tmp_path: Path) -> None:
    """Units hold at most `unit_rows` rows of one row group; keys, ranks and occurrences are counted inside them."""
    path = write_table(tmp_path / "a.parquet", {"uuid": ["x", "x", "x", "y", "x"], "prompt": ["p", "q", "p", "p", "p"]})
    rows, placements, manifests = read_all(path, unit_rows=4)
    assert [manifest.unit.slice_index for manifest in manifests] == [0, 1]
    assert [key for manifest in manifests for key in manifest.keys] == [row.key.text for row in rows]
    assert [(place.rank, place.occurrence) for place in placements] == [(0, 0), (0, 1), (1, 2), (0, 0), (0, 0)]
    assert {place.unit for place in placements} == {unit_text(manifest.unit) for manifest in manifests}
    assert [place.row for place in placements] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("unit_rows", [7, 1000, 1500, 5000])
def test_units_do_not_depend_on_batches(tmp_path: Path, unit_rows: int) -> None:
    """Wherever the reader cuts its batches, units are cut at their own length and kept columns follow."""
    count = 2300
    path = write_table(tmp_path / "a.parquet", {**prompts(count), "note": list(range(count))}, row_group_size=2000)
    _, _, manifests = read_all(path, InputColumns(keep=("note",)), unit_rows=unit_rows)
    assert [key for manifest in manifests for key in manifest.ranked_keys()] == [
        f"{row.key.text}#0" for row in read_all(path)[0]]
    notes = [note for manifest in manifests for note in kept(manifest, "note")]
    assert notes == list(range(count))
    assert all(len(kept(manifest, "note")) == len(manifest.keys) <= unit_rows for manifest in manifests)


def kept(manifest: Manifest, name: str) -> list[object]:
    """A kept column of a unit."""
    values: list[object] = pa.ipc.open_stream(manifest.kept).read_all().column(name).to_pylist()
    return values


def test_empty_files_and_row_groups_have_no_unit(tmp_path: Path) -> None:
    """A file without rows, a row group without rows and an empty JSONL file read as nothing."""
    schema = pa.schema([("uuid", pa.string()), ("prompt", pa.string())])
    with pq.ParquetWriter(tmp_path / "a.parquet", schema) as writer:
        writer.write_table(schema.empty_table())
        writer.write_table(pa.table(prompts(1), schema))
        writer.write_table(schema.empty_table())
    write_table(tmp_path / "b.parquet", {"prompt": pa.array([], pa.string())})
    write_lines(tmp_path / "c.jsonl", [])
    rows, placements, manifests = read_all(tmp_path / "*")
    assert len(rows) == len(placements) == len(manifests) == 1


def test_unit_names_mirror_the_input() -> None:
    """A unit's text and published path follow from the input alone, and no two inputs share a path."""
    unit = OutputUnit("file:///data/in/a#1.parquet", 3, 12)
    assert unit_text(unit) == "file:///data/in/a#1.parquet#rg-000003-s-0012"
    assert published_name(unit) == "data/in/a#1.parquet/rg-000003-s-0012.parquet"
    assert published_name(OutputUnit("gs://b/k//x.jsonl", 0, 0)) == "gs/b/k/x.jsonl/rg-000000-s-0000.parquet"
    with pytest.raises(InputError, match="relative part"):
        published_name(OutputUnit("gs://b/../x", 0, 0))
    with pytest.raises(InputError, match="same path"):
        check_distinct_paths(["gs://b/x.parquet", "file:///gs/b/x.parquet"])
