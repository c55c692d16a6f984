"""Laws of the object store that other tests store in: it must be as unlike a disk as the real ones."""

from __future__ import annotations

import pytest
from apache_beam.io.aws.clients.s3.messages import S3ClientError
from apache_beam.io.filesystem import BeamIOError, CompressionTypes
from apache_beam.io.filesystems import FileSystems

from batchgen_beam.storage.files import exists, list_below, list_files, move, read_bytes, remove, write_atomically
from tests.support.object_store import StoreFaults, bucket


def test_an_object_appears_when_its_writer_closes() -> None:
    """What is half written is not there."""
    with bucket("store") as store:
        with FileSystems.create(f"{store.uri}/a/b", compression_type=CompressionTypes.UNCOMPRESSED) as handle:
            handle.write(b"whole")
            assert not exists(f"{store.uri}/a/b")
        assert read_bytes(f"{store.uri}/a/b") == b"whole"
        assert not exists(f"{store.uri}/a"), "there are no folders"


def test_files_by_name_work_on_objects() -> None:
    """One write for each object, no temporary name; patterns, moves and removals as on a disk."""
    with bucket("store") as store:
        for name in ("x/1.json", "x/y/2.json", "z.json"):
            write_atomically(f"{store.uri}/{name}", name.encode())
        assert store.names() == ["x/1.json", "x/y/2.json", "z.json"]
        assert list_files(f"{store.uri}/x/*.json") == [f"{store.uri}/x/1.json"]
        assert list_below(f"{store.uri}/x", "**.json") == ["1.json", "y/2.json"]
        move(f"{store.uri}/z.json", f"{store.uri}/w.json")
        assert remove(f"{store.uri}/w.json")
        assert not remove(f"{store.uri}/w.json")
        assert store.names() == ["x/1.json", "x/y/2.json"]


def test_every_nth_write_fails() -> None:
    """A failed write leaves what was there before."""
    with bucket("store", StoreFaults(failed_writes=3, seed=1)) as store:
        write_atomically(f"{store.uri}/a", b"first")
        with pytest.raises(S3ClientError, match="reduce your request rate"), FileSystems.create(
                f"{store.uri}/a", compression_type=CompressionTypes.UNCOMPRESSED) as handle:
            handle.write(b"second")
        assert read_bytes(f"{store.uri}/a") == b"first"
        assert store.failed == 1


def test_listed_objects_vanish() -> None:
    """A name from a listing may have no object any more: for opening no file, for the rest Beam's error."""
    with bucket("store", StoreFaults(vanishing=2, within="parts/")) as store:
        for name in ("parts/a", "parts/b", "kept"):
            write_atomically(f"{store.uri}/{name}", b"x")
        assert list_files(f"{store.uri}/**") == [f"{store.uri}/{name}" for name in ("kept", "parts/a", "parts/b")]
        assert store.names() == ["kept", "parts/a"]
        with pytest.raises(FileNotFoundError):
            read_bytes(f"{store.uri}/parts/b")
        with pytest.raises(BeamIOError):
            FileSystems.last_updated(f"{store.uri}/parts/b")
        assert store.lost == 1
