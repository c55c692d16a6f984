"""What is known of each published unit: `_units/<published name>.json`, written once its files stand.

Owns the content of a record, and the rule by which a later run leaves the unit as it is.  Does not know how units are
read or published, nor Beam's transforms.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from batchgen_beam.errors import ErrorCode
from batchgen_beam.records import OutputUnit
from batchgen_beam.storage.files import exists, join, list_below, read_bytes, remove, write_atomically
from batchgen_beam.storage.schemas import FAILURE_SCHEMA, RESULT_SCHEMA
from batchgen_beam.storage.totals import RunTotals
from batchgen_beam.storage.units import FAILURES, RESULTS, UNIT_FILES, published_name

__all__ = ["UnitRecord", "UnitRecords", "forget_record", "read_record", "recorded_names"]

UNITS_FOLDER = "_units"
RECORD_VERSION = 1
_EXTENSION = ".json"


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRecord:
    """A published unit: the digest of all that its files depend on, and what they hold.

    `content` is the digest of the content print, `run` the run that published it, `transient` the number of failures
    that the next run tries again, `files` the folders in which it has a file.
    """

    digest: str
    content: str
    run: str
    totals: RunTotals
    transient: int
    files: tuple[str, ...]

    def to_json(self) -> bytes:
        """The content of a record's file."""
        facts = {"version": RECORD_VERSION, "digest": self.digest, "content": self.content, "run": self.run,
                 "transient": self.transient, "files": list(self.files), "totals": self.totals.as_facts()}
        return (json.dumps(facts, indent=2) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes) -> UnitRecord | None:
        """The inverse of `to_json`; None for other content or another version."""
        try:
            return cls._of(json.loads(data))
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    @classmethod
    def _of(cls, facts: Mapping[str, Any]) -> UnitRecord | None:
        if facts["version"] != RECORD_VERSION:
            return None
        return cls(digest=facts["digest"], content=facts["content"], run=facts["run"], transient=facts["transient"],
                   files=tuple(facts["files"]), totals=RunTotals.from_facts(facts["totals"]))


def _path(output: str, name: str) -> str:
    return join(output, UNITS_FOLDER, name + _EXTENSION)


def read_record(output: str, name: str) -> UnitRecord | None:
    """The record of the unit of this `published_name`; None where there is none that can be used."""
    path = _path(output, name)
    return UnitRecord.from_json(read_bytes(path)) if exists(path) else None


def forget_record(output: str, name: str) -> None:
    """Remove a unit's record: from here on, no run takes its files for complete."""
    remove(_path(output, name))


def recorded_names(output: str) -> list[str]:
    """The `published_name` of every unit that has a record, sorted."""
    found = list_below(join(output, UNITS_FOLDER), UNIT_FILES + _EXTENSION)
    return [path.removesuffix(_EXTENSION) for path in found]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitRecords:
    """The records of an output folder as one run reads and writes them.

    `content` is the digest of the run's content print, `model` the name in its results, `retry` the codes of failures
    that it tries again although they are final.  `own`: passes of the run have published units before, which may stay.
    Without passes, the run's own units are nothing to it: a step that is done again does what it did at first.
    """

    output: str
    content: str
    model: str
    run: str
    retry: frozenset[ErrorCode] = field(default_factory=frozenset)
    own: bool = False

    def digest(self, rows: str) -> str:
        """The digest of a unit whose rows have the digest `rows`: of all that decides the bytes of its files."""
        parts = (rows, self.content, self.model, RESULT_SCHEMA.to_string(), FAILURE_SCHEMA.to_string())
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def reusable(self, shard: str, row_group: int, slices: int | None) -> dict[str, UnitRecord]:
        """Records of a row group by `published_name`: of the units that need no work unless their rows have changed.

        `slices` is how many units the row group has (None: not known).
        """
        found = {name: read_record(self.output, name) for name in self._names(shard, row_group, slices)}
        return {name: record for name, record in found.items()
                if record is not None and (self.own or record.run != self.run) and self._complete(name, record)}

    def _names(self, shard: str, row_group: int, slices: int | None) -> list[str]:
        if slices is not None:
            return [published_name(OutputUnit(shard, row_group, index)) for index in range(slices)]
        folder = published_name(OutputUnit(shard, row_group, 0)).rpartition("/")[0]
        found = list_below(join(self.output, UNITS_FOLDER, folder), f"rg-{row_group:06d}-s-*.parquet{_EXTENSION}")
        return [f"{folder}/{name.removesuffix(_EXTENSION)}" for name in found]

    def _complete(self, name: str, record: UnitRecord) -> bool:
        return (record.content == self.content and not self._tries_again(record)
                and all(exists(join(self.output, kind, name)) for kind in record.files))

    def _tries_again(self, record: UnitRecord) -> bool:
        """Whether the unit has failures that this run should try; those that it met itself it has tried."""
        again = record.transient or record.totals.failures.keys() & self.retry
        return record.run != self.run and bool(again)

    def kept(self, record: UnitRecord) -> RunTotals:
        """What a unit that stays as it is adds to the run's counts; as reused only if another run published it."""
        if record.run == self.run:
            return record.totals
        return replace(record.totals, skipped_units=1, skipped_rows=record.totals.rows)

    def record(self, *, rows: str, totals: RunTotals, transient: int) -> UnitRecord:
        """The record of a unit that this run publishes; `rows` is the digest of its rows."""
        files = tuple(kind for kind, count in ((RESULTS, totals.results), (FAILURES, totals.failed)) if count)
        return UnitRecord(digest=self.digest(rows), content=self.content, run=self.run, totals=totals,
                          transient=transient, files=files)

    def stands(self, name: str, record: UnitRecord) -> bool:
        """Whether the same was published already: by another run, or an earlier attempt of this one.

        If not, what is recorded goes where it says otherwise: while files are of two runs, none is complete.
        """
        found = read_record(self.output, name)
        if found is None:
            return False
        if replace(found, run=self.run) != record:
            forget_record(self.output, name)
            return False
        return self._complete(name, found)

    def write(self, name: str, record: UnitRecord) -> None:
        """Record a unit whose files stand."""
        write_atomically(_path(self.output, name), record.to_json())
