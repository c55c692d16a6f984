"""What was found out about this machine once, in small JSON files beside the model cache.

Owns reading, and writing by many processes at once.  Does not know what the files say.
"""

from __future__ import annotations

import json
import logging
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["recall", "remembered"]

LOG = logging.getLogger(__name__)

T = TypeVar("T")


def remembered(place: Path, find_out: Callable[[], T], *, to_json: Callable[[T], Any],
               from_json: Callable[[Any], T]) -> T:
    """What the file at `place` says, or what `find_out` says, which is kept there for the next process.

    Where another process was first, its word counts; a broken file, of which `from_json` says so by a `ValueError`,
    `KeyError` or `TypeError`, is replaced.  A folder that can't be written is no fault: the next process finds out
    again.
    """
    known = recall(place, from_json)
    if known is not None:
        return known
    found = find_out()
    try:
        _keep(place, json.dumps(to_json(found)), from_json)
        return _read(place, from_json)
    except OSError as error:
        LOG.info("%s is not remembered: %s", place.name, error)
        return found


def recall(place: Path, from_json: Callable[[Any], T]) -> T | None:
    """What the file at `place` says; None where there is none, or a broken one."""
    try:
        return _read(place, from_json)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read(place: Path, from_json: Callable[[Any], T]) -> T:
    return from_json(json.loads(place.read_text()))


def _keep(place: Path, text: str, from_json: Callable[[Any], T]) -> None:
    """Write a file aside and give it its name, unless it has been given to a whole one."""
    partial = place.with_name(f".{place.name}-{uuid.uuid4().hex}.tmp")
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        partial.write_text(text)
        os.link(partial, place)
    except FileExistsError:
        try:
            _read(place, from_json)
        except (ValueError, KeyError, TypeError):
            os.replace(partial, place)
    finally:
        partial.unlink(missing_ok=True)
