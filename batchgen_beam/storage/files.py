"""Whole small files, written so that a reader sees all of them or nothing.

Owns the rule for each kind of store: local files get a temporary name and a rename; object stores show an object
only once it is closed, and their rename would be a copy.  Does not know what the bytes mean.
"""

from __future__ import annotations

import uuid

from apache_beam.io.filesystem import CompressionTypes
from apache_beam.io.filesystems import FileSystems

from batchgen_beam.storage.row_identity import normalise_uri, open_path

__all__ = ["exists", "join", "list_files", "read_bytes", "remove", "write_atomically"]

_PLAIN = CompressionTypes.UNCOMPRESSED


def join(folder: str, *parts: str) -> str:
    """The path of something in a folder, local or remote."""
    return "/".join([folder.rstrip("/"), *parts])


def write_atomically(path: str, data: bytes) -> None:
    """Create or replace a file, with the folders it needs; it is never seen half written."""
    uri = normalise_uri(path)
    target = open_path(uri)
    if uri == target:
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


def read_bytes(path: str) -> bytes:
    """The whole file as stored, never decompressed."""
    with FileSystems.open(open_path(normalise_uri(path)), compression_type=_PLAIN) as handle:
        data: bytes = handle.read()
    return data


def exists(path: str) -> bool:
    """Whether there is such a file (or local folder)."""
    found: bool = FileSystems.exists(open_path(normalise_uri(path)))
    return found


def remove(path: str) -> bool:
    """Delete a file if it is there; whether it was."""
    if not exists(path):
        return False
    FileSystems.delete([open_path(normalise_uri(path))])
    return True


def list_files(pattern: str) -> list[str]:
    """Normalised URIs of the files that match, sorted.

    Beam's patterns: `*` within a folder, `**` across folders.  A path that exists as it stands is itself.
    """
    if exists(pattern):
        return [normalise_uri(pattern)]
    found = FileSystems.match([open_path(normalise_uri(pattern))])
    return sorted({normalise_uri(entry.path) for result in found for entry in result.metadata_list})
