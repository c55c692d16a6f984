"""Files by name: one spelling for each, whole small files that are never seen half written, streams of stored bytes.

Owns the spelling, which is durable (ids of rows are made from it), and the rule for each kind of store: local files
get a temporary name and a rename; object stores show an object only once it is closed, and their rename would be a
copy.  Does not know what the bytes mean.
"""

from __future__ import annotations

import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from apache_beam.io.filesystem import BeamIOError, CompressionTypes
from apache_beam.io.filesystems import FileSystems

from batchgen_beam.errors import UserError
from batchgen_beam.storage.store_errors import may_pass, store_errors

__all__ = ["WRITE_PAUSES", "StoredFile", "check_file", "check_store", "exists", "join", "list_below", "list_files",
           "list_stored", "move", "normalise_uri", "open_stored", "read_bytes", "remove", "stored_size",
           "write_atomically"]

LOG = logging.getLogger(__name__)

WRITE_PAUSES = (0.1, 0.5, 2.0)

_PLAIN = CompressionTypes.UNCOMPRESSED
_FILE_SCHEME = "file://"
_EXTRAS = {"gs": "gcp", "s3": "aws", "azfs": "azure", "hdfs": "hadoop"}
"""Scheme -> the extra of apache-beam that brings its client."""


def normalise_uri(path: str) -> str:
    """One spelling for each file: local paths become `file://` and the absolute path, other schemes are lower-cased.

    Nothing is percent-encoded and links are not resolved.
    """
    scheme, separator, rest = path.partition("://")
    if not separator:
        return _FILE_SCHEME + os.path.abspath(path)
    if scheme.lower() == "file":
        return _FILE_SCHEME + os.path.abspath(rest)
    return f"{scheme.lower()}://{rest}"


def _beam_path(path: str) -> str:
    """What Beam's file systems open: local files by their path, everything else by its URI."""
    return normalise_uri(path).removeprefix(_FILE_SCHEME)


def join(folder: str, *parts: str) -> str:
    """The path of something in a folder, local or remote."""
    return "/".join([folder.rstrip("/"), *parts])


def check_store(path: str, refusal: type[UserError]) -> None:
    """Raise `refusal` with the URI and the remedy where the store that holds `path` can't be used here."""
    try:
        exists(path)
    except (ValueError, AssertionError, BeamIOError) as error:  # what Beam raises without file system or its client
        raise refusal(f"{normalise_uri(path)} can't be reached: {_remedy(path)} ({error})") from error


def check_file(uri: str, refusal: type[UserError]) -> None:
    """Raise `refusal` where a local path is no readable file (a folder, a pipe), or a name is not UTF-8.

    Does not open it: whoever opens a pipe waits for its writer.
    """
    try:
        uri.encode()
    except UnicodeEncodeError as error:
        raise refusal(f"{uri!a} has a name that is not UTF-8; rename it") from error
    if not uri.startswith(_FILE_SCHEME):
        return
    path = uri.removeprefix(_FILE_SCHEME)
    if os.path.isdir(path):
        raise refusal(f"{uri} is a folder; name its files by a pattern such as {path}/*")
    if not os.path.isfile(path):
        raise refusal(f"{uri} is no regular file but a pipe, a device or a broken link; name a file")
    if not os.access(path, os.R_OK):
        raise refusal(f"{uri} can't be read: no permission; change its mode, or leave it out")


def _remedy(path: str) -> str:
    scheme = path.partition("://")[0].lower()
    if scheme in _EXTRAS:
        return f"it needs pip install 'apache-beam[{_EXTRAS[scheme]}]' and credentials for {scheme}://"
    return f"use a local path or one of {', '.join(f'{known}://' for known in _EXTRAS)}"


def open_stored(path: str) -> BinaryIO:
    """A stream of the bytes as stored, never decompressed."""
    handle: BinaryIO = FileSystems.open(_beam_path(path), compression_type=_PLAIN)
    return handle


def read_bytes(path: str) -> bytes:
    """The whole file as stored."""
    with open_stored(path) as handle:
        return handle.read()


def write_atomically(path: str, data: bytes, *, pauses: Sequence[float] = WRITE_PAUSES,
                     pause: Callable[[float], object] = time.sleep) -> None:
    """Create or replace a file, with the folders it needs; it is never seen half written.

    A failure that may pass is tried again after each of `pauses` seconds; a full disk or a missing permission is
    raised at once.
    """
    for seconds in pauses:
        try:
            return _write_once(path, data)
        except store_errors() as error:
            if not may_pass(error):
                raise
            LOG.warning("%s was not written and is tried again: %s", path, error)
        pause(seconds)
    return _write_once(path, data)


def _write_once(path: str, data: bytes) -> None:
    target = _beam_path(path)
    if "://" in target:
        _write(target, data)
        return
    folder, _, name = target.rpartition("/")
    temporary = f"{folder}/.{name}.{uuid.uuid4().hex}.tmp"
    try:
        _write(temporary, data)
        FileSystems.rename([temporary], [target])
    finally:
        remove(temporary)


def _write(path: str, data: bytes) -> None:
    with FileSystems.create(path, compression_type=_PLAIN) as handle:
        handle.write(data)


def exists(path: str) -> bool:
    """Whether there is such a file (or local folder)."""
    found: bool = FileSystems.exists(_beam_path(path))
    return found


def remove(path: str) -> bool:
    """Delete a file if it is there; whether it was."""
    target = _beam_path(path)
    if "://" not in target:  # Beam would take the name for a pattern
        with suppress(FileNotFoundError):
            os.remove(target)
            return True
        return False
    if not exists(target):
        return False
    try:
        FileSystems.delete([target])
    except store_errors():
        if exists(target):
            raise
        return False
    return True


def move(source: str, target: str) -> None:
    """Rename a file, with the folders it needs; one that is not there any more is left to whoever moved it."""
    start, end = _beam_path(source), _beam_path(target)
    if not exists(start):
        return
    with suppress(OSError):  # the folder is there already
        FileSystems.mkdirs(end.rpartition("/")[0])
    try:
        FileSystems.rename([start], [end])
    except BeamIOError:
        if exists(start):
            raise


@dataclass(frozen=True, slots=True)
class StoredFile:
    """What a listing says: the normalised URI, bytes, and seconds since the epoch (0.0 from a store without times)."""

    uri: str
    size: int
    modified: float


def stored_size(path: str) -> int:
    """The bytes of a file, as stored."""
    target = _beam_path(path)
    return int(FileSystems.get_filesystem(target).size(target))


def list_files(pattern: str) -> list[str]:
    """Normalised URIs of the files that match, sorted.

    Beam's patterns: `*` within a folder, `**` across folders.  A path that exists as it stands is itself.
    """
    if exists(pattern):
        return [normalise_uri(pattern)]
    found = FileSystems.match([_beam_path(pattern)])
    return sorted({normalise_uri(entry.path) for result in found for entry in result.metadata_list})


def list_below(folder: str, pattern: str) -> list[str]:
    """Paths relative to `folder`, sorted, of the files in it that match; the folder's own name is no pattern."""
    root = _as_root(folder)
    return [file.uri.removeprefix(root) for file in list_stored(folder, pattern)]


def list_stored(folder: str, pattern: str) -> list[StoredFile]:
    """The files in `folder` that match, by URI; the folder's own name is no pattern."""
    root = _as_root(folder)
    literal = re.sub(r"[*?\[]", "?", root)  # Beam's patterns have no quoting: match too much, then compare
    found = FileSystems.match([_beam_path(literal + pattern)])
    entries = {normalise_uri(entry.path): entry for result in found for entry in result.metadata_list}
    return [StoredFile(uri, entry.size_in_bytes, float(entry.last_updated_in_seconds))
            for uri, entry in sorted(entries.items()) if uri.startswith(root)]


def _as_root(folder: str) -> str:
    return f"{normalise_uri(folder).rstrip('/')}/"
