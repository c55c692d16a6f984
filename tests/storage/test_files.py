"""Whole small files."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen_beam.storage.files import exists, join, list_files, read_bytes, remove, write_atomically


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
