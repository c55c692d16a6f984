"""Names of files, and whole small files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from apache_beam.io.filesystem import BeamIOError

from batchgen_beam.errors import InputError, OutputError
from batchgen_beam.storage.files import (
    WRITE_PAUSES,
    StoredFile,
    check_store,
    exists,
    join,
    list_below,
    list_files,
    list_stored,
    move,
    normalise_uri,
    read_bytes,
    remove,
    write_atomically,
)
from batchgen_beam.storage.store_errors import may_pass, store_errors
from tests.support.watched_files import WatchedFiles, failing, watched


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


def test_a_listing_says_sizes_and_times(tmp_path: Path) -> None:
    """Local files and those of a store: URI, bytes and when they were written, by URI; no other files."""
    for name, size in (("b.x", 3), ("a[1].x", 5), ("c.y", 7)):
        write_atomically(str(tmp_path / "o[1]" / name), b"." * size)
        os.utime(tmp_path / "o[1]" / name, (size, 1000.5 + size))
    folder = tmp_path / "o[1]"
    for root, prefix in ((str(folder), "file://"), (watched(folder), "watched://")):
        assert list_stored(root, "*.x") == [
            StoredFile(f"{prefix}{folder}/a[1].x", 5, 1005.5), StoredFile(f"{prefix}{folder}/b.x", 3, 1003.5)]
    assert list_stored(str(tmp_path / "none"), "*.x") == []


def test_removing_takes_a_name_for_no_pattern(tmp_path: Path) -> None:
    """Stars and brackets in a local name are characters."""
    for name in ("a*", "ab", "[a]", "a"):
        (tmp_path / name).touch()
    assert remove(str(tmp_path / "a*"))
    assert remove(f"file://{tmp_path}/[a]")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "ab"]


def test_a_file_that_somebody_else_removes_first_is_removed(tmp_path: Path) -> None:
    """Between the look and the deletion of a store: no error, but it was not us.  A refusal stays one."""
    path = tmp_path / "a"
    path.touch()
    WatchedFiles.before_delete = lambda _: path.unlink()
    try:
        assert not remove(watched(path))
        path.touch()
        WatchedFiles.before_delete = lambda name: _raise(PermissionError(errno.EACCES, "no", name))
        with pytest.raises(PermissionError):
            remove(watched(path))
    finally:
        WatchedFiles.before_delete = None


def _raise(error: Exception) -> None:
    raise error


def _failing_times(count: int, make: Callable[[], Exception]) -> Callable[[str], None]:
    """Fails so many times, then no more."""
    left = [count]

    def before_write(_: str) -> None:
        left[0] -= 1
        if left[0] >= 0:
            raise make()

    return before_write


def test_a_failure_that_may_pass_is_tried_again(tmp_path: Path) -> None:
    """As often as there are pauses, which are the caller's to wait; then the error is the caller's too."""
    path, pauses = watched(tmp_path / "a"), list[float]()
    with failing(_failing_times(len(WRITE_PAUSES), lambda: BeamIOError("the store is out of order"))):
        write_atomically(path, b"data", pause=pauses.append)
    assert read_bytes(path) == b"data"
    assert tuple(pauses) == WRITE_PAUSES
    with (failing(_failing_times(len(WRITE_PAUSES) + 1, lambda: TimeoutError("again"))),
          pytest.raises(TimeoutError, match="again")):
        write_atomically(path, b"other", pause=pauses.append)
    assert read_bytes(path) == b"data"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS])
def test_a_full_disk_and_a_missing_permission_are_raised_at_once(tmp_path: Path, number: int) -> None:
    """Also where Beam has wrapped them, once or for each path."""
    plain = OSError(number, "no")
    wrapped = OSError(plain)
    for error in (plain, wrapped, BeamIOError("failed", {"a": plain}), BeamIOError("failed", {"a": wrapped})):
        assert not may_pass(error)
        pauses = list[float]()
        with failing(_failing_times(1, lambda error=error: error)), pytest.raises(OSError, match="no"):
            write_atomically(watched(tmp_path / "a"), b"", pause=pauses.append)
        assert pauses == []


def test_clients_errors_that_are_no_oserrors_count(tmp_path: Path) -> None:
    """S3's client raises its own: a refused request lasts, an overloaded server may not.  Our faults are neither."""
    messages = pytest.importorskip("apache_beam.io.aws.clients.s3.messages")
    assert messages.S3ClientError in store_errors()
    assert may_pass(messages.S3ClientError("slow down", 503))
    assert not may_pass(messages.S3ClientError("forbidden", 403))
    path, pauses = watched(tmp_path / "a"), list[float]()
    with failing(_failing_times(2, lambda: messages.S3ClientError("slow down", 503))):
        write_atomically(path, b"data", pause=pauses.append)
    assert read_bytes(path) == b"data"
    assert len(pauses) == 2
    with failing(_failing_times(1, lambda: ZeroDivisionError())), pytest.raises(ZeroDivisionError):
        write_atomically(path, b"data", pause=pauses.append)


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
