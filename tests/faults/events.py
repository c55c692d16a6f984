"""What happens to the files of an output folder, told as it happens (Linux inotify).

Owns the watching of folders that appear while it watches, and the names by which events are told apart: parts of the
journal, published units, reports, temporary files.  Does not know processes or what an event is good for.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Self

__all__ = ["Change", "Event", "FolderWatch", "is_merged", "is_part", "is_report", "is_temporary", "is_unit"]

_CLOSE_WRITE, _MOVED_FROM, _MOVED_TO, _CREATE, _DELETE = 0x8, 0x40, 0x80, 0x100, 0x200
_IS_DIR, _OVERFLOW = 0x40000000, 0x4000
_WATCHED = _CLOSE_WRITE | _MOVED_FROM | _MOVED_TO | _CREATE | _DELETE
_HEADER = struct.Struct("iIII")


class Change(Enum):
    """What happened to a file."""

    CREATED = _CREATE
    WRITTEN = _CLOSE_WRITE
    APPEARED = _MOVED_TO
    VANISHED = _MOVED_FROM
    DELETED = _DELETE


@dataclass(frozen=True, slots=True)
class Event:
    """A change of a file; `path` is relative to the watched folder."""

    change: Change
    path: str

    def appeared(self) -> bool:
        """Whether a file has now its final name and content."""
        return self.change is Change.APPEARED


def is_part(path: str) -> bool:
    """A part of the journal that a run wrote while it was generating."""
    return fnmatchcase(path, "_journal/*/run=*/[0-9a-f]*.parquet")


def is_merged(path: str) -> bool:
    """A part of the journal that was made of others."""
    return fnmatchcase(path, "_journal/*/run=*/merged-*.parquet")


def is_unit(path: str) -> bool:
    """The published results of a unit."""
    return fnmatchcase(path, "results/*/rg-*.parquet")


def is_report(path: str) -> bool:
    """The report of a run that has published all: what comes before `_SUCCESS`."""
    return fnmatchcase(path, "_runs/*.json") and not path.endswith(".engine.json")


def is_temporary(path: str) -> bool:
    """A file that is written under another name than it will have, results of rows or their journal."""
    return fnmatchcase(path, "*/.*.parquet.*.tmp")


class FolderWatch:
    """All changes of files below `root`, which must be there, from the time that the watch is opened."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._places: dict[int, Path] = {}
        self._found: set[Event] = set()

    def __enter__(self) -> Self:
        self._handle = self._checked(self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK))
        for _ in self._add(self._root):
            pass
        self._found.clear()
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._handle)

    def events(self, seconds: float) -> Iterator[Event]:
        """What happens within `seconds`, one event after another."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self._handle], [], [], left)[0]:
                yield from self._read()

    def _read(self) -> Iterator[Event]:
        data, start = os.read(self._handle, 1 << 16), 0
        while start < len(data):
            watch, mask, _, length = _HEADER.unpack_from(data, start)
            name = data[start + _HEADER.size : start + _HEADER.size + length].rstrip(b"\0").decode()
            start += _HEADER.size + length
            if mask & _OVERFLOW:
                raise OSError("more changes than the system keeps for a watch")
            if watch in self._places and name:
                yield from self._told(self._places[watch] / name, mask)

    def _told(self, path: Path, mask: int) -> Iterator[Event]:
        if mask & _IS_DIR:
            if mask & (_CREATE | _MOVED_TO):
                yield from self._add(path)
            return
        event = self._event(Change(mask & _WATCHED), path)
        if event in self._found:  # told when its folder was found
            self._found.discard(event)
        else:
            yield event

    def _event(self, change: Change, path: Path) -> Event:
        return Event(change, path.relative_to(self._root).as_posix())

    def _add(self, folder: Path) -> Iterator[Event]:
        """Watch a folder and those in it; gives what came to a new one before its watch."""
        watch = self._libc.inotify_add_watch(self._handle, os.fsencode(folder), _WATCHED)
        if watch < 0 and ctypes.get_errno() == 2:  # gone already
            return
        self._places[self._checked(watch)] = folder
        for entry in list(os.scandir(folder)):
            path = Path(entry.path)
            if entry.is_dir():
                yield from self._add(path)
            else:
                event = self._event(Change.CREATED if entry.name.startswith(".") else Change.APPEARED, path)
                self._found.add(event)
                yield event

    @staticmethod
    def _checked(result: int) -> int:
        if result < 0:
            raise OSError(ctypes.get_errno(), f"inotify: {os.strerror(ctypes.get_errno())}")
        return result
