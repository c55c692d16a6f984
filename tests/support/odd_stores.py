"""Stores for fsspec that keep files in memory and behave as real ones do on a bad day."""

from __future__ import annotations

from typing import Any, ClassVar

import fsspec
from botocore.exceptions import NoCredentialsError
from fsspec.implementations.memory import MemoryFileSystem


class OddStore(MemoryFileSystem):
    """`odd://`: memory with faults that a test sets; what was read is counted."""

    protocol = ("odd",)
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    cachable = False

    tags: ClassVar[dict[str, str]] = {}
    """Path -> checksum, where the store gives one."""
    sizes: ClassVar[dict[str, int]] = {}
    """Path -> size that the store claims."""
    breaks_after: ClassVar[int | None] = None
    """Bytes of one file after which the connection breaks."""
    locked: ClassVar[bool] = False
    """Whether the client finds no credentials."""
    reads: ClassVar[list[int]] = []
    """Bytes of each read, by any thread."""
    on_read: ClassVar[Any] = None

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        stripped: str = super()._strip_protocol(path.replace("odd://", "memory://", 1))
        return stripped

    def _shown(self, facts: dict[str, Any]) -> dict[str, Any]:
        name = facts["name"]
        size = {"size": self.sizes[name]} if name in self.sizes else {}
        return {**facts, **size, **({"ETag": self.tags[name]} if name in self.tags else {})}

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        if OddStore.locked:
            raise NoCredentialsError
        return self._shown(super().info(path, **kwargs))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        found = super().ls(path, detail=True, **kwargs)
        return [self._shown(facts) for facts in found] if detail else [facts["name"] for facts in found]

    def open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        stream = super().open(path, mode, **kwargs)
        return Reader(stream) if mode == "rb" else stream

    @classmethod
    def reset(cls) -> None:
        """An empty store without faults."""
        cls.store, cls.pseudo_dirs, cls.tags, cls.sizes = {}, [""], {}, {}
        cls.breaks_after, cls.locked, cls.reads, cls.on_read = None, False, [], None


class Reader:
    """A stream that counts, and breaks where it is told to."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.close()

    def seek(self, offset: int) -> None:
        self._stream.seek(offset)

    def read(self, count: int) -> bytes:
        if OddStore.on_read is not None:
            OddStore.on_read()
        limit = OddStore.breaks_after
        if limit is not None:
            if self._stream.tell() >= limit:
                raise ConnectionError("connection reset by peer")
            count = min(count, limit - self._stream.tell())
        data: bytes = self._stream.read(count)
        OddStore.reads.append(len(data))
        return data


fsspec.register_implementation("odd", OddStore, clobber=True)
