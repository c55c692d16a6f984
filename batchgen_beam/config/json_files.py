"""The one reader of files, or parts of files, that hold a JSON object.

Owns that anything else is refused by name.  Does not know which keys there are.
"""

from __future__ import annotations

import json
from pathlib import Path

from batchgen_beam.config.reading import JsonObject
from batchgen_beam.errors import CheckpointError

__all__ = ["parse_object", "read_object"]


def read_object(path: Path) -> JsonObject:
    """The object in a file; one without keys where there is no such file.

    Raises:
        CheckpointError: the file can't be read, is no JSON, or holds something else than an object.
    """
    if not path.exists():
        return JsonObject({}, str(path))
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error
    return parse_object(data, str(path))


def parse_object(data: bytes, where: str) -> JsonObject:
    """The JSON object in `data`; a `CheckpointError` names `where`."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{where} must hold a JSON object, it holds {type(values).__name__}")
    return JsonObject(values, where)
