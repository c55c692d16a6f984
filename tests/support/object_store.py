"""An object store in memory, as a Beam file system: `objects://bucket/name`, for runners in this process.

Owns what sets such stores apart from a disk: an object appears whole, once its writer closes it; there are no
folders; a listing goes by prefix, and what it names may be gone when it is read; a rename is a copy and a deletion.
A bucket may be told to fail some writes and to lose some objects right after a listing has named them.
"""

from __future__ import annotations

import errno
import io
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO, ClassVar, NoReturn

from apache_beam.io.aws.clients.s3.messages import S3ClientError
from apache_beam.io.filesystem import BeamIOError, CompressionTypes, FileMetadata, FileSystem

__all__ = ["SCHEME", "Bucket", "ObjectStore", "StoreFaults", "bucket"]

SCHEME = "objects"
PREFIX = f"{SCHEME}://"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFaults:
    """Every `failed_writes`-th write fails as S3 does when it is busy, every `vanishing`-th listed object is deleted.

    0: none.  `seed` says which ones begin.  Only names that hold `within` are affected.
    """

    failed_writes: int = 0
    vanishing: int = 0
    within: str = ""
    seed: int = 0


class Bucket:
    """The objects of one bucket by name, and how many were written, failed and lost.  Any thread may use it."""

    def __init__(self, name: str, faults: StoreFaults) -> None:
        self.name = name
        self.faults = faults
        self.failed = self.lost = 0
        self._writes = self._listed = faults.seed
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        """The bucket as a folder."""
        return f"{PREFIX}{self.name}"

    def names(self, prefix: str = "") -> list[str]:
        """What is there, sorted."""
        with self._lock:
            return sorted(name for name in self._objects if name.startswith(prefix))

    def put(self, name: str, data: bytes) -> None:
        """Create or replace an object, unless this write is one that fails; Beam's S3 can't write empty ones."""
        if not data:
            raise S3ClientError(f"{self.uri}/{name} would be empty", 400)
        with self._lock:
            if self.faults.failed_writes and self.faults.within in name:
                self._writes += 1
                if self._writes % self.faults.failed_writes == 0:
                    self.failed += 1
                    raise S3ClientError(f"{self.uri}/{name}: please reduce your request rate", 503)
            self._objects[name] = data, time.time()

    def get(self, name: str) -> tuple[bytes, float]:
        """An object and when it was written (s since the epoch)."""
        with self._lock:
            if name not in self._objects:
                raise FileNotFoundError(errno.ENOENT, "no such object", f"{self.uri}/{name}")
            return self._objects[name]

    def delete(self, name: str) -> None:
        """Delete an object; one that is not there is no error."""
        with self._lock:
            self._objects.pop(name, None)

    def listing(self, prefix: str) -> list[FileMetadata]:
        """What is there under a prefix, some of which is lost thereafter."""
        with self._lock:
            found = sorted((name, *stored) for name, stored in self._objects.items() if name.startswith(prefix))
            for name, _, _ in found:
                self._lose(name)
        return [FileMetadata(f"{self.uri}/{name}", len(data), updated) for name, data, updated in found]

    def _lose(self, name: str) -> None:
        if self.faults.vanishing and self.faults.within in name:
            self._listed += 1
            if self._listed % self.faults.vanishing == 0:
                self.lost += 1
                del self._objects[name]


class _Upload(io.BytesIO):
    """A writer whose bytes become an object when it is closed."""

    def __init__(self, bucket: Bucket, name: str) -> None:
        super().__init__()
        self._bucket, self._name = bucket, name

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            self._bucket.put(self._name, data)


class ObjectStore(FileSystem):
    """The buckets that exist now, for Beam, which makes an instance for each operation."""

    BUCKETS: ClassVar[dict[str, Bucket]] = {}

    @classmethod
    def scheme(cls) -> str:
        return SCHEME

    def join(self, basepath: str, *paths: str) -> str:
        return "/".join([basepath.rstrip("/"), *(path.strip("/") for path in paths)])

    def split(self, path: str) -> tuple[str, str]:
        head, _, tail = path.rpartition("/")
        return head, tail

    def mkdirs(self, path: str) -> None:
        """There are no folders."""

    def has_dirs(self) -> bool:
        return False

    def create(self, path: str, mime_type: str = "", compression_type: str = CompressionTypes.AUTO) -> BinaryIO:
        _check_plain(compression_type)
        return _Upload(*self._place(path))

    def open(self, path: str, mime_type: str = "", compression_type: str = CompressionTypes.AUTO) -> BinaryIO:
        _check_plain(compression_type)
        return io.BytesIO(self._get(path)[0])

    def copy(self, source_file_names: Sequence[str], destination_file_names: Sequence[str]) -> None:
        for source, target in zip(source_file_names, destination_file_names, strict=True):
            data, _ = self._found(source)
            bucket, name = self._place(target)
            bucket.put(name, data)

    def rename(self, source_file_names: Sequence[str], destination_file_names: Sequence[str]) -> None:
        self.copy(source_file_names, destination_file_names)
        self.delete(source_file_names)

    def exists(self, path: str) -> bool:
        bucket, name = self._place(path)
        return bucket.names(name)[:1] == [name]

    def size(self, path: str) -> int:
        return len(self._found(path)[0])

    def last_updated(self, path: str) -> float:
        return self._found(path)[1]

    def checksum(self, path: str) -> NoReturn:
        raise BeamIOError("this store has no checksums", {path: None})

    def metadata(self, path: str) -> FileMetadata:
        data, updated = self._found(path)
        return FileMetadata(path, len(data), updated)

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            bucket, name = self._place(path)
            bucket.delete(name)

    def _list(self, dir_or_prefix: str) -> Iterator[FileMetadata]:
        bucket, prefix = self._place(dir_or_prefix)
        yield from bucket.listing(prefix)

    def _place(self, path: str) -> tuple[Bucket, str]:
        name, _, rest = path.removeprefix(PREFIX).partition("/")
        if name not in self.BUCKETS:
            raise BeamIOError(f"no bucket {name}", {path: None})
        return self.BUCKETS[name], rest

    def _get(self, path: str) -> tuple[bytes, float]:
        bucket, name = self._place(path)
        return bucket.get(name)

    def _found(self, path: str) -> tuple[bytes, float]:
        """What Beam's operations on stored files raise is a `BeamIOError`, but for `open`."""
        try:
            return self._get(path)
        except FileNotFoundError as error:
            raise BeamIOError("no such object", {path: error}) from error


def _check_plain(compression_type: str) -> None:
    if compression_type != CompressionTypes.UNCOMPRESSED:
        raise ValueError(f"objects are stored as they are, not as {compression_type}")


@contextmanager
def bucket(name: str, faults: StoreFaults | None = None) -> Iterator[Bucket]:
    """A bucket that exists inside the block."""
    made = ObjectStore.BUCKETS[name] = Bucket(name, faults or StoreFaults())
    try:
        yield made
    finally:
        del ObjectStore.BUCKETS[name]
