"""Local files behind a scheme of their own, `watched:///path`: tests count what is read and decide what fails.

An object store in one respect: a file is written under its own name, so that a failed write may leave a torn one.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from apache_beam.io.filesystem import CompressionTypes, FileMetadata
from apache_beam.io.localfilesystem import LocalFileSystem

__all__ = ["WatchedFiles", "failing", "watched"]

PREFIX = "watched://"


def watched(path: Path) -> str:
    """The file or folder under the watched scheme."""
    return f"{PREFIX}{path}"


def _local(path: str) -> str:
    return path.removeprefix(PREFIX)


class _CountedFile(io.FileIO):
    """A file that adds what is read of it to the count."""

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        WatchedFiles.bytes_read += count or 0
        return count

    def read(self, size: int = -1) -> bytes:
        data = super().read(size)
        WatchedFiles.bytes_read += len(data or b"")
        return data


class WatchedFiles(LocalFileSystem):
    """Beam makes an instance for each operation, so what is watched belongs to the class."""

    bytes_read: ClassVar[int] = 0
    before_write: ClassVar[Callable[[str], None] | None] = None
    before_delete: ClassVar[Callable[[str], None] | None] = None
    before_list: ClassVar[Callable[[str], None] | None] = None

    @classmethod
    def scheme(cls) -> str:
        return "watched"

    def create(self, path: str, mime_type: str = "", compression_type: str = CompressionTypes.AUTO) -> BinaryIO:
        if self.before_write is not None:
            type(self).before_write(path)
        return super().create(_local(path), mime_type, compression_type)

    def open(self, path: str, mime_type: str = "", compression_type: str = CompressionTypes.AUTO) -> BinaryIO:
        return _CountedFile(_local(path), "rb")

    def exists(self, path: str) -> bool:
        return super().exists(_local(path))

    def metadata(self, path: str) -> FileMetadata:
        found = super().metadata(_local(path))
        return FileMetadata(path, found.size_in_bytes, found.last_updated_in_seconds)

    def delete(self, paths: Sequence[str]) -> None:
        for path in paths:
            if self.before_delete is not None:
                type(self).before_delete(path)
            os.remove(_local(path))

    def _list(self, dir_or_prefix: str) -> Iterator[FileMetadata]:
        if self.before_list is not None:
            type(self).before_list(dir_or_prefix)
        for found in super()._list(_local(dir_or_prefix)):
            yield FileMetadata(watched(Path(found.path)), found.size_in_bytes, found.last_updated_in_seconds)


@contextmanager
def failing(before_write: Callable[[str], None], before_list: Callable[[str], None] | None = None) -> Iterator[None]:
    """Inside the block, every write asks `before_write`, every listing `before_list`; both may raise."""
    WatchedFiles.before_write, WatchedFiles.before_list = before_write, before_list
    try:
        yield
    finally:
        WatchedFiles.before_write = WatchedFiles.before_list = None
