"""From what the user calls a model to a local folder in the one form that everything else knows.

Owns the kinds of names, and the cache of converted GGUF files: one folder for each file content, made once even if
several processes ask at the same time, and visible only when it is complete.  Does not know architectures or
tokenizers, nor how stores are read (`model_download`).
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import socket
import time
import uuid
from pathlib import Path

from batchgen_beam.errors import CheckpointError, OptionError
from batchgen_beam.text.gguf_tokenizer import write_tokenizer
from batchgen_beam.transforms.model_download import fetch_model
from batchgen_beam.weights.file_lock import locked
from batchgen_beam.weights.gguf import convert
from batchgen_beam.weights.gguf_metadata import is_gguf

__all__ = ["CONVERTER_VERSION", "EVERYWHERE", "IN_IMAGE", "is_on_a_store", "local_path", "resolve_model"]

LOG = logging.getLogger(__name__)

CONVERTER_VERSION = 1
"""Part of the cached folder's name: raised when a conversion would give other files."""

_READ_BYTES = 1 << 22

EVERYWHERE = "file://"
"""In front of a path that every machine has: on a shared file system."""

IN_IMAGE = "worker:"
"""In front of a path that every worker has: in the workers' image."""


def is_on_a_store(model: str) -> bool:
    """Whether `model` is a URI that every machine can copy from."""
    return "://" in model and local_path(model) is None


def local_path(model: str) -> Path | None:
    """The path that `model` names on the machine which asks; None for a URI of a store."""
    if model.lower().startswith(IN_IMAGE):
        return Path("/" + model[len(IN_IMAGE):].lstrip("/"))
    if model.lower().startswith(EVERYWHERE):
        model = model[len(EVERYWHERE):]
    return None if "://" in model else Path(model).expanduser().absolute()


def resolve_model(model: str, cache_dir: Path) -> Path:
    """The folder of the model on this machine: a folder as it is, one on a store copied, a GGUF file converted.

    Copies and conversions are kept in `cache_dir`.

    Raises:
        CheckpointError: nothing is there, its store can't be read, or a file is no GGUF file or unreadable.
        OptionError: `cache_dir` can't hold the copy or the conversion.
    """
    path = local_path(model) or fetch_model(model, cache_dir.expanduser().absolute())
    if path.is_dir():
        return path
    if not path.is_file():
        raise CheckpointError(f"model {model!r}: there is neither a folder nor a file of that name{_where(model)}")
    if not is_gguf(path):
        raise CheckpointError(f"model {model!r} is a file but no GGUF file; give the folder that holds config.json")
    return _converted(path, cache_dir)


def _where(model: str) -> str:
    if model.lower().startswith((IN_IMAGE, EVERYWHERE)):
        return f" on {socket.gethostname()}; it has to be there on every worker"
    return ""


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
    with locked(folder.with_suffix(".lock")):
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

