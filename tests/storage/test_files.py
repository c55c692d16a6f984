"""Names of files, and whole small files."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen_beam.errors import InputError, OutputError
from batchgen_beam.storage.files import (
    check_store,
    exists,
    join,
    list_below,
    list_files,
    move,
    normalise_uri,
    read_bytes,
    remove,
    write_atomically,
)


def test_local_names_have_one_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative, absolute, dotted and file:// names of a file are one URI; remote names keep their spelling."""
    monkeypatch.chdir(tmp_path)
    wanted = f"file://{tmp_path}/a b.parquet"
    spellings = "a b.parquet", "./a b.parquet", f"{tmp_path}/x/../a b.parquet", f"FILE://{tmp_path}/a b.parquet"
    for name in (*spellings, wanted):
        assert normalise_uri(name) == wanted
    assert normalise_uri("GS://Bucket/Key%20x") == "gs://Bucket/Key%20x"


def test_a_store_without_client_is_refused_with_its_remedy(tmp_path: Path) -> None:
    """An unknown scheme, or a known one whose client is not installed, is refused by URI and remedy, as asked."""
    check_store(str(tmp_path / "not there yet"), OutputError)
    with pytest.raises(InputError, match=r"nonsense://a/b can't be reached: use a local path or one of gs://, s3://"):
        check_store("nonsense://a/b", InputError)
    with pytest.raises(OutputError, match=r"hdfs://a/b can't be reached: .* 'apache-beam\[hadoop\]'"):
        check_store("HDFS://a/b", OutputError)


def test_a_moved_file_is_at_its_new_place_only(tmp_path: Path) -> None:
    """Moving makes folders, replaces what is there, and is done where the file has gone already."""
    source, target = str(tmp_path / "a"), str(tmp_path / "x" / "y" / "a")
    for data in (b"one", b"two"):
        write_atomically(source, data)
        move(source, target)
        assert not exists(source)
        assert read_bytes(target) == data
    move(source, target)
    assert read_bytes(target) == b"two"


def test_a_folder_name_is_no_pattern(tmp_path: Path) -> None:
    """What is listed below a folder is in that folder, whatever characters its name has; names are relative to it."""
    for name in ("o[1]*", "o[1]x", "o1*"):
        write_atomically(str(tmp_path / name / "deep" / f"{name[1]}.x"), b"")
    assert list_below(str(tmp_path / "o[1]*"), "**/*.x") == ["deep/[.x"]
    assert list_below(f"{tmp_path}/o1*/", "**/*.x") == ["deep/1.x"]
    assert list_below(str(tmp_path / "none"), "**/*.x") == []


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """A file in folders that do not exist yet is created, read back as stored and replaced."""
    path = str(tmp_path / "a" / "b.json.gz")
    write_atomically(path, b"one")
    assert read_bytes(path) == b"one", "never decompressed by its name"
    write_atomically(f"file://{path}", b"two")
    assert read_bytes(path) == b"two"
    assert [entry.name for entry in (tmp_path / "a").iterdir()] == ["b.json.gz"], "no temporary file stays"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    """If the rename fails, the target is as it was and the temporary name is gone."""
    target = tmp_path / "x"
    target.mkdir()
    (target / "kept").touch()
    with pytest.raises(OSError, match="Rename"):
        write_atomically(str(target), b"data")
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_removing_says_whether_there_was_something(tmp_path: Path) -> None:
    """Removing is idempotent."""
    path = str(tmp_path / "x")
    write_atomically(path, b"")
    assert exists(path)
    assert remove(path)
    assert not remove(path)
    assert not exists(path)


def test_listing_is_sorted_and_literal_names_win(tmp_path: Path) -> None:
    """Patterns give sorted normalised URIs; a file whose name looks like a pattern is found by its name."""
    for name in ("b.x", "a.x", "deep/c.x", "a[1].x"):
        write_atomically(str(tmp_path / name), b"")
    base = f"file://{tmp_path}"
    assert list_files(f"{tmp_path}/?.x") == [f"{base}/a.x", f"{base}/b.x"]
    assert list_files(f"{tmp_path}/**.x") == [f"{base}/a.x", f"{base}/a[1].x", f"{base}/b.x", f"{base}/deep/c.x"]
    assert list_files(f"{tmp_path}/a[1].x") == [f"{base}/a[1].x"]
    assert list_files(f"{tmp_path}/none*") == []


def test_join_keeps_schemes() -> None:
    """Folders with and without a slash at the end, local and remote."""
    assert join("gs://b/", "c", "d") == "gs://b/c/d"
    assert join("out", "c") == "out/c"
    assert join("/", "c") == "/c"
