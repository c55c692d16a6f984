"""From what the user calls a model to a local folder in the one form that everything else knows.

Owns the cache of converted GGUF files: one folder for each file content, made once even if several processes ask at
the same time, and visible only when it is complete.  Does not know architectures or tokenizers.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchgen_beam.errors import CheckpointError, OptionError
from batchgen_beam.text.gguf_tokenizer import write_tokenizer
from batchgen_beam.weights.gguf import convert
from batchgen_beam.weights.gguf_metadata import is_gguf

__all__ = ["CONVERTER_VERSION", "resolve_model"]

LOG = logging.getLogger(__name__)

CONVERTER_VERSION = 1
"""Part of the cached folder's name: raised when a conversion would give other files."""

_READ_BYTES = 1 << 22


def resolve_model(uri: str, cache_dir: Path) -> Path:
    """The folder of the model: a folder as it is, a GGUF file converted into `cache_dir`.

    Raises:
        CheckpointError: nothing is there, the scheme is not supported, or the file is no GGUF file or unreadable.
        OptionError: `cache_dir` can't hold the conversion.
    """
    scheme, separator, rest = uri.partition("://")
    if separator and scheme.lower() != "file":
        raise CheckpointError(f"model {uri!r}: scheme {scheme!r} is not supported; give a local folder or a GGUF file")
    path = Path(rest if separator else uri).expanduser().absolute()
    if path.is_dir():
        return path
    if not path.is_file():
        raise CheckpointError(f"model {uri!r}: there is neither a folder nor a file of that name")
    if not is_gguf(path):
        raise CheckpointError(f"model {uri!r} is a file but no GGUF file; give the folder that holds config.json")
    return _converted(path, cache_dir)


def _converted(file: Path, cache_dir: Path) -> Path:
    cache = cache_dir.expanduser().absolute()
    try:
        folder = cache / f"gguf-{_content_hash(file)[:32]}-v{CONVERTER_VERSION}"
    except OSError as error:
        raise CheckpointError(f"model {file} can't be read: {error.strerror}") from error
    if not folder.is_dir():
        try:
            _convert_once(file, folder)
        except OSError as error:
            raise OptionError(f"--model-cache={cache} can't hold the converted model: {error.strerror or error}; name "
                              "a folder that can be written, with room for the weights as float32") from error
    return folder


def _convert_once(file: Path, folder: Path) -> None:
    """Convert unless another process has; under the lock, all partial folders are of processes that died."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")):
        if folder.is_dir():
            return
        for left in folder.parent.glob(f".{folder.name}-*"):
            shutil.rmtree(left, ignore_errors=True)
        _convert_into(file, folder)


def _convert_into(file: Path, folder: Path) -> None:
    """Convert beside the folder and rename, so that a folder of that name is always whole."""
    started = time.monotonic()
    partial = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    try:
        write_tokenizer(convert(file, partial), partial)
        partial.rename(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {str(error).removeprefix(f'{file}: ')}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    LOG.info("converted %s into %s in %.1f s", file, folder, time.monotonic() - started)


def _content_hash(file: Path) -> str:
    """SHA-256 of the whole file, each time anew: a remembered one could give another model's folder away."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file lock; the system frees it if the process dies."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
