"""What travels beside the questions: places of rows, manifests of output units, answers that found their place.

Owns the names of units, as text (keys) and as published paths.  Does not know Beam, Arrow or file contents.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from batchgen_beam.errors import InputError
from batchgen_beam.records import Answer, OutputUnit, RowKey

__all__ = ["FAILURES", "RESULTS", "UNIT_FILES", "Manifest", "PlacedAnswer", "Placement", "check_distinct_paths",
           "published_name", "ranked_key", "unit_text"]

RESULTS = "results"
FAILURES = "failures"

UNIT_FILES = "**/rg-*-s-*.parquet"
"""The pattern of every unit's file below `results/` or `failures/`; other files there are the user's."""


def unit_text(unit: OutputUnit) -> str:
    """The unit as a key: its shard's URI and the name of its file.  No two units share one."""
    return f"{unit.shard}#{_file_stem(unit)}"


def published_name(unit: OutputUnit) -> str:
    """The path of the unit's file below `results/` or `failures/`: it mirrors the input and depends on nothing else.

    `file:///data/a.parquet` becomes `data/a.parquet/rg-000000-s-0000.parquet`, `gs://bucket/a.parquet`
    `gs/bucket/a.parquet/rg-000000-s-0000.parquet`.
    """
    return f"{_mirrored(unit.shard)}/{_file_stem(unit)}.parquet"


def _file_stem(unit: OutputUnit) -> str:
    return f"rg-{unit.row_group:06d}-s-{unit.slice_index:04d}"


def _mirrored(shard: str) -> str:
    scheme, _, rest = shard.partition("://")
    parts = [part for part in rest.split("/") if part]
    if ".." in parts or "." in parts:
        raise InputError(f"input {shard} has a relative part; name it by its plain path")
    return "/".join(parts if scheme == "file" else [scheme, *parts])


def check_distinct_paths(shards: Iterable[str]) -> None:
    """Refuse inputs whose results would be written to the same folder."""
    seen: dict[str, str] = {}
    for shard in shards:
        other = seen.setdefault(_mirrored(shard), shard)
        if other != shard:
            raise InputError(f"inputs {other} and {shard} would publish to the same path; run them into two outputs")


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one answer of a row key belongs.

    `rank` counts the unit's earlier rows of equal key, `occurrence` those of equal id.
    """

    unit: str
    row: int
    rank: int
    occurrence: int

    def __reduce__(self) -> tuple[type[Placement], tuple[str, int, int, int]]:
        return type(self), (self.unit, self.row, self.rank, self.occurrence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The rows of an output unit in input order: key texts, and kept columns as an Arrow stream (empty: none).

    `digest` is that of the rows, whether or not kept columns are carried (`storage.row_identity.RowsDigest`).
    """

    unit: OutputUnit
    keys: tuple[str, ...]
    digest: str
    kept: bytes = b""

    def ranked_keys(self) -> list[str]:
        """The keys with their rank among equals, which are unique."""
        counts: dict[str, int] = {}
        names = []
        for key in self.keys:
            rank = counts.get(key, 0)
            counts[key] = rank + 1
            names.append(ranked_key(key, rank))
        return names


def ranked_key(key: str, rank: int) -> str:
    """A row key and its rank among the unit's equal keys, as one name."""
    return f"{key}#{rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedAnswer:
    """An input row's answer: one failure, or its outcomes by choice."""

    row: int
    rank: int
    occurrence: int
    answers: tuple[Answer, ...]

    @property
    def key(self) -> RowKey:
        """The row's key."""
        return self.answers[0].key

    @property
    def name(self) -> str:
        """The key with its rank among equals in the unit."""
        return ranked_key(self.key.text, self.rank)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return _placed, (self.row, self.rank, self.occurrence, self.answers)


def _placed(row: int, rank: int, occurrence: int, answers: tuple[Answer, ...]) -> PlacedAnswer:
    return PlacedAnswer(row=row, rank=rank, occurrence=occurrence, answers=answers)
