"""Reads the config.json of a local folder, or of a remote one that fsspec reaches.  Knows no model family."""

from __future__ import annotations

import re
from pathlib import Path

import fsspec

from batchgen_beam.config.json_files import parse_object
from batchgen_beam.config.reading import JsonObject
from batchgen_beam.errors import CheckpointError

__all__ = ["CONFIG_NAME", "read_config_json"]

CONFIG_NAME = "config.json"
_SCHEME = re.compile(r"^[a-zA-Z][a-zA-Z0-9+.-]*://")


def read_config_json(identifier: str) -> JsonObject | None:
    """The config.json of the folder `identifier`; None when `identifier` is no folder.

    A folder without config.json, a file, and JSON that is no object are refused by name.
    """
    if _SCHEME.match(identifier):
        return _read_remote(identifier)
    folder = Path(identifier).expanduser()
    if folder.is_file():
        raise CheckpointError(f"{identifier} is a file; a model is a folder with {CONFIG_NAME} and safetensors")
    if not folder.is_dir():
        return None
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the folder is no checkpoint, or its copy is incomplete")
    return parse_object(path.read_bytes(), str(path))


def _read_remote(identifier: str) -> JsonObject:
    where = f"{identifier.rstrip('/')}/{CONFIG_NAME}"
    try:
        with fsspec.open(where, "rb") as file:
            data: bytes = file.read()
    except (ImportError, OSError, ValueError) as error:
        raise CheckpointError(f"{where} can't be read: {error}") from error
    return parse_object(data, where)
