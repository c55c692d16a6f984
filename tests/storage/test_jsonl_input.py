"""JSON Lines shards as rows."""

from __future__ import annotations

import bz2
import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from batchgen_beam.errors import InputError
from batchgen_beam.settings import InputColumns
from batchgen_beam.storage import jsonl_input
from batchgen_beam.storage.inputs import plan_input
from batchgen_beam.storage.jsonl_input import count_lines
from tests.support.storing import read_all, write_lines, write_table


def test_rows_are_lines(tmp_path: Path) -> None:
    """Row numbers are line numbers from 0; blank lines count but are no rows; the last newline may be missing."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"uuid":"a","prompt":"1"}\r\n\n  \n{"uuid":"b","prompt":"2"}')
    rows, placements, _ = read_all(path)
    assert [(row.key.uuid, row.values, row.problem) for row in rows] == [
        ("a", {"prompt": "1"}, None), ("b", {"prompt": "2"}, None)]
    assert [place.row for place in placements] == [0, 3]


def test_lines_longer_than_a_block(tmp_path: Path) -> None:
    """A line that spans several reads is one row."""
    prompts = ["x" * 3_000_000, "short", "y" * 2_000_000]
    rows, _, _ = read_all(write_lines(tmp_path / "a.jsonl", [{"prompt": text} for text in prompts]))
    assert [row.values["prompt"] for row in rows] == prompts


def test_lines_that_are_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line over the limit is a row with a problem, of which no more than that is kept; its neighbours are read."""
    monkeypatch.setattr(jsonl_input, "_LINE_BYTES", 3_000_000)
    fits = '{"prompt": "' + "x" * 2_999_986 + '"}'
    assert len(fits) == 3_000_000
    path = write_lines(tmp_path / "a.jsonl", [fits, fits + " ", " " * 5_000_000, {"prompt": "y"}])
    rows, placements, _ = read_all(path)
    assert [row.problem for row in rows] == [
        None, "line 2 is longer than 3000000 bytes", "line 3 is longer than 3000000 bytes", None]
    assert [place.row for place in placements] == [0, 1, 2, 3]
    assert rows[3].values == {"prompt": "y"}


def test_a_file_without_newlines_is_one_row_of_bounded_size(tmp_path: Path) -> None:
    """A line beyond the limit is a problem of its row; what follows the limit is read and not kept."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * (80 << 20))
    rows, placements, _ = read_all(path)
    assert [row.problem for row in rows] == ["line 1 is longer than 67108864 bytes"]
    assert len(placements) == 1


@pytest.mark.parametrize(("line", "reason"), [
    ("{", "line 2 is not valid JSON"), ("[1]", "line 2 holds a JSON list"), ("NaN", "NaN is no JSON value"),
    ('{"prompt": Infinity}', "Infinity is no JSON value"), ("[" * 100_000, "line 2 is not valid JSON"),
    ('{"messages": ' + "[" * 200 + "]" * 200 + "}", "line 2 is nested more than 64 levels deep"),
    ('{"seed": ' + "9" * 5000 + "}", "line 2 is not valid JSON"),
])
def test_a_bad_line_is_a_row_with_a_problem(tmp_path: Path, line: str, reason: str) -> None:
    """Every kind of bad line is one row that says its position; its neighbours are untouched."""
    rows, _, _ = read_all(write_lines(tmp_path / "a.jsonl", [{"prompt": "1"}, line, {"prompt": "3"}]))
    assert [row.values for row in rows] == [{"prompt": "1"}, {}, {"prompt": "3"}]
    assert reason in str(rows[1].problem)
    assert [row.problem for row in (rows[0], rows[2])] == [None, None]


def test_bytes_that_are_no_utf8(tmp_path: Path) -> None:
    """A line in another encoding is a row with a problem."""
    (tmp_path / "a.jsonl").write_bytes(b'{"prompt": "\xe4"}\n')
    rows, _, _ = read_all(tmp_path / "a.jsonl")
    assert "line 1 is not valid JSON: 'utf-8'" in str(rows[0].problem)


@pytest.mark.parametrize(("name", "pack"), [
    ("a.jsonl.gz", gzip.compress), ("a.ndjson.bz2", bz2.compress),
    ("a.jsonl.zst", lambda data: pa.compress(data, codec="zstd", asbytes=True)),
])
def test_compressed_files_are_whole_or_refused(tmp_path: Path, name: str, pack: Any) -> None:
    """Compression follows the extension, joined archives are one file, and a truncated one is never taken as short."""
    lines = b"".join(b'{"prompt": "%d"}\n' % (index * 7919) for index in range(2000))
    path = tmp_path / name
    path.write_bytes(pack(lines) + pack(lines))
    assert len(read_all(path)[0]) == 4000
    path.write_bytes(pack(lines)[:-100])
    with pytest.raises(InputError, match=f"{name} is damaged or incomplete"):
        read_all(path)


def test_absent_ids_and_null_ids_differ(tmp_path: Path) -> None:
    """Without id column the position identifies; a null id, or the absence of a column that was named, is a problem."""
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": "1"}, {"uuid": None, "prompt": "2"}])
    rows, _, _ = read_all(path)
    assert [row.problem for row in rows] == [None, "column 'uuid' is null, it must identify the row"]
    named, _, _ = read_all(path, InputColumns(id="key"))
    assert [row.problem for row in named] == ["column 'key' is null, it must identify the row"] * 2
    assert [row.key.uuid for row in named] == [row.key.uuid for row in rows]


def test_kept_values_are_text(tmp_path: Path) -> None:
    """JSON has no column types: strings are kept as they are, other values as compact JSON."""
    write_lines(tmp_path / "a.jsonl", [{"prompt": "1", "k": "s"}, {"prompt": "2", "k": {"a": [1, None]}},
                                       {"prompt": "3"}, {"prompt": "4", "k": "\ud800"}])
    write_table(tmp_path / "b.parquet", {"prompt": ["5"], "k": ["t"]})
    _, _, manifests = read_all(tmp_path / "*", InputColumns(keep=("k",)))
    kept = [pa.ipc.open_stream(manifest.kept).read_all() for manifest in manifests]
    assert [table.column("k").to_pylist() for table in kept] == [["s", '{"a":[1,null]}', None, "\\ud800"], ["t"]]
    assert {str(table.schema.field("k").type) for table in kept} == {"string"}


def test_counting_stops_at_the_limit(tmp_path: Path) -> None:
    """Only as many lines are counted as are wanted."""
    path = write_lines(tmp_path / "a.jsonl", [{"prompt": str(index)} for index in range(5)])
    assert [count_lines(f"file://{path}", limit) for limit in (0, 3, 5, 9)] == [0, 3, 5, 5]
    assert plan_input([str(path)], InputColumns(), limit=3).rows == 3
