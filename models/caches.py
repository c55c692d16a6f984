"""The kinds of memory that a layer keeps of past tokens.  Plain names, so that planners need no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["CacheKind", "GroupKey"]


class CacheKind(StrEnum):
    """How a layer's memory of past tokens is kept."""

    PAGED = "paged"
    WINDOWED = "windowed"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class GroupKey:
    """Cache entries of equal kind and window share page ids (or state slots) over all layers."""

    kind: CacheKind
    window: int | None = None
