"""Models on object stores and the like, copied once for each host into the model cache.

Owns what is fetched (the files that a model may be read from: never pickles), the name of the copy, the room that it
needs, and how a copy that was interrupted goes on.  Stores are read through fsspec.  Does not know what the files mean.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from batchgen_beam.errors import CheckpointError, OptionError
from batchgen_beam.storage.store_errors import store_errors
from batchgen_beam.weights.file_lock import locked

__all__ = ["SMALL_FILES", "fetch_model"]

LOG = logging.getLogger(__name__)

SMALL_FILES = (".json", ".jinja", ".txt", ".model")
"""Endings of a model folder's files beside its weights."""

_FETCHED = (*SMALL_FILES, ".safetensors")
_CHECKSUMS = ("ETag", "etag", "md5Hash", "crc32c", "content_md5", "checksum", "blob_id", "generation")
_TIMES = ("LastModified", "last_modified", "updated", "mtime", "created")
"""Where stores keep what tells one content of a file from another; times only where there is no checksum."""

_BLOCK = 1 << 23
_STREAMS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredFile:
    """A file of a remote model; `version` differs for another content, where the store says anything at all."""

    name: str
    path: str
    size: int
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _RemoteModel:
    """What stands under a URI now: the files of a folder, or one file."""

    uri: str
    store: Any
    files: tuple[_StoredFile, ...]
    is_file: bool

    @property
    def prefix(self) -> str:
        """Common to the copies of all versions of the model."""
        return f"model-{hashlib.sha256(self.uri.encode()).hexdigest()[:16]}"

    @property
    def folder_name(self) -> str:
        """The name of the copy of these very files."""
        facts = json.dumps([[file.name, file.size, file.version] for file in self.files])
        return f"{self.prefix}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def fetch_model(uri: str, cache: Path) -> Path:
    """The local copy of a model's folder, or of its one file, made unless this host has it.

    Raises:
        CheckpointError: nothing is there, or the store can't be read.
        OptionError: `cache` can't hold the copy.
    """
    remote = _look(uri.rstrip("/"))
    folder = cache / remote.folder_name
    if not folder.is_dir():
        try:
            _fetch_once(remote, folder)
        except OSError as error:
            raise OptionError(f"--model-cache={cache} can't hold {uri}: {error.strerror or error}; name a folder that "
                              "can be written") from error
    return folder / remote.files[0].name if remote.is_file else folder


def _look(uri: str) -> _RemoteModel:
    """List what is there; files of other kinds and folders within the folder are not looked at."""
    with _store_faults(uri):
        store, path = fsspec.core.url_to_fs(uri)
        store.invalidate_cache()  # clients remember listings
        try:
            about = store.info(path)
        except FileNotFoundError as error:
            raise CheckpointError(f"model {uri!r}: there is neither a folder nor a file of that name") from error
        is_file = about["type"] == "file"
        found = [about] if is_file else [entry for entry in store.ls(path, detail=True)
                                         if entry["type"] == "file" and entry["name"].endswith(_FETCHED)]
    files = sorted((_stored_file(uri, facts) for facts in found), key=lambda file: file.name)
    if not files:
        raise CheckpointError(f"model {uri!r} is a folder without config.json and safetensors")
    return _RemoteModel(uri=uri, store=store, files=tuple(files), is_file=is_file)


def _stored_file(uri: str, facts: Mapping[str, Any]) -> _StoredFile:
    place: str = facts["name"]
    if not isinstance(facts.get("size"), int):
        raise CheckpointError(f"model {uri!r}: its store does not say how large {place} is; copy the model to a local "
                              "folder, or to an object store")
    known = next((names for names in (_CHECKSUMS, _TIMES) if any(facts.get(name) for name in names)), ())
    version = json.dumps([str(facts[name]) for name in known if facts.get(name)])
    return _StoredFile(name=place.rstrip("/").rpartition("/")[2], path=place, size=facts["size"], version=version)


def _fetch_once(remote: _RemoteModel, folder: Path) -> None:
    """Copy unless another process has; under the lock, all other partial copies of the model are dead."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial")
    with locked(folder.with_name(f"{remote.prefix}.lock")):
        if folder.is_dir():
            return
        for left in folder.parent.glob(f".{remote.prefix}-*.partial"):
            if left != partial:
                shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(exist_ok=True)
        _check_room(remote, partial)
        with ThreadPoolExecutor(_STREAMS) as streams:
            list(streams.map(lambda file: _copy(remote, file, partial / file.name), remote.files))
        if _look(remote.uri).folder_name != folder.name:
            raise CheckpointError(f"model {remote.uri} was changed while it was copied; run again when it is whole")
        partial.rename(folder)
        LOG.info("copied %d files of %s into %s", len(remote.files), remote.uri, folder)


def _check_room(remote: _RemoteModel, partial: Path) -> None:
    there = sum(path.stat().st_size for path in partial.iterdir())
    needed, free = sum(file.size for file in remote.files) - there, shutil.disk_usage(partial).free
    if needed > free:
        raise OptionError(f"model {remote.uri} needs {needed:,} bytes, --model-cache={partial.parent} has {free:,} "
                          "bytes free; free some, or name a folder on a larger disk")


def _copy(remote: _RemoteModel, file: _StoredFile, target: Path) -> None:
    """Copy one file, from where a process that died had come to."""
    with target.open("ab") as stream:
        if stream.tell() > file.size:
            stream.truncate(0)
        for block in _blocks(remote, file, start=stream.tell()):
            stream.write(block)
        if stream.tell() != file.size:
            raise CheckpointError(f"model {remote.uri}: {file.path} gave {stream.tell():,} of {file.size:,} bytes; "
                                  "run again to go on")


def _blocks(remote: _RemoteModel, file: _StoredFile, *, start: int) -> Iterator[bytes]:
    if start == file.size:
        return
    with _store_faults(remote.uri), remote.store.open(file.path, "rb", block_size=_BLOCK) as source:
        source.seek(start)
        while block := source.read(_BLOCK):
            yield block


@contextmanager
def _store_faults(uri: str) -> Iterator[None]:
    """Whatever a store's client raises is a `CheckpointError` with the URI."""
    try:
        yield
    except _client_errors() as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"model {uri!r} can't be read: {error or type(error).__name__}; gs:// needs pip install "
                              "gcsfs, s3:// s3fs, hf:// huggingface_hub, each with access to the model") from error


def _client_errors() -> tuple[type[Exception], ...]:
    return (*store_errors(), ImportError, ValueError)
