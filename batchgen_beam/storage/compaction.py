"""Merging the parts of ended runs into few.

Owns which parts may be merged and in which batches, and the order of steps that loses nothing: write, then delete
exactly what was read.  Killed in between, both stay, and what they say twice settles to the same.  Does not know Beam,
nor how one finds out which runs have ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from batchgen_beam.storage.journal import Journal, Part, PartReading
from batchgen_beam.storage.journal_rows import estimated_size
from batchgen_beam.storage.settling import Entry, settle_entries

__all__ = ["BATCH_BYTES", "FULL_BYTES", "MERGE_BYTES", "MERGE_ENTRIES", "SILENT_RUN_SECONDS", "CompactionResult",
           "compact", "compaction_batches", "ended_runs"]

BATCH_BYTES = 64 << 20
"""Stored bytes that one worker merges."""
FULL_BYTES = BATCH_BYTES // 2
"""A part of this size is left as it is."""
MERGE_BYTES = 256 << 20
MERGE_ENTRIES = 131_072
"""What is held in memory at once, before compression; it becomes one part."""
SILENT_RUN_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactionResult:
    """What a compaction did; `problems` says of each part that was left alone what is wrong with it."""

    read: int = 0
    written: int = 0
    deleted: int = 0
    entries_read: int = 0
    entries_written: int = 0
    problems: tuple[str, ...] = ()

    def __add__(self, other: CompactionResult) -> CompactionResult:
        return CompactionResult(
            read=self.read + other.read, written=self.written + other.written, deleted=self.deleted + other.deleted,
            entries_read=self.entries_read + other.entries_read,
            entries_written=self.entries_written + other.entries_written, problems=self.problems + other.problems)


def ended_runs(parts: Iterable[Part], *, finished: Collection[str], seen: Mapping[str, float],
               now: float) -> frozenset[str]:
    """The known runs that have a report, or have shown no sign of life for an hour.

    `finished`: runs with a report.  `seen`: run -> when it last reported progress, in seconds since the epoch.
    """
    latest = defaultdict(float, seen)
    for part in parts:
        latest[part.run] = max(latest[part.run], part.modified)
    silent = {run for run, when in latest.items() if now - when > SILENT_RUN_SECONDS}
    return frozenset(silent.union(finished))


def compaction_batches(parts: Iterable[Part], *, ended: Collection[str], now: float,
                       compact_seconds: float) -> list[tuple[Part, ...]]:
    """What to merge: batches of at least two parts and at most `BATCH_BYTES`, of ended runs, old enough, not yet full.

    Depends on the set of parts only.
    """
    batches: list[list[Part]] = []
    size = 0
    for part in sorted(parts):
        if part.run not in ended or now - part.modified < compact_seconds or part.size >= FULL_BYTES:
            continue
        if not batches or size + part.size > BATCH_BYTES:
            batches.append([])
            size = 0
        batches[-1].append(part)
        size += part.size
    return [tuple(batch) for batch in batches if len(batch) > 1]


def compact(journal: Journal, run: str, parts: Iterable[Part], *, merge_entries: int = MERGE_ENTRIES,
            merge_bytes: int = MERGE_BYTES) -> CompactionResult:
    """Merge parts into new ones of `run`.

    Left alone: parts that can't be read, or not wholly (a later release may), and one that has nobody to merge with.
    """
    problems: list[str] = []
    total = CompactionResult()
    for group in _groups(_readings(journal, parts, problems), merge_entries, merge_bytes):
        if len(group) > 1:
            total += _merge(journal, run, group)
    return total + CompactionResult(problems=tuple(problems))


_Readings = list[tuple[Part, PartReading]]


def _readings(journal: Journal, parts: Iterable[Part], problems: list[str]) -> Iterator[tuple[Part, PartReading]]:
    for part in parts:
        reading = journal.entries(part)
        if reading.problem is not None:
            problems.append(reading.problem)
        elif reading.ignored:
            problems.append(f"journal part {part.path} is not merged: {reading.ignored[0]}")
        else:
            yield part, reading


def _groups(readings: Iterable[tuple[Part, PartReading]], merge_entries: int, merge_bytes: int) -> Iterator[_Readings]:
    """In order, as many as fit into memory together; a single one may be bigger."""
    group: _Readings = []
    entries = size = 0
    for part, reading in readings:
        more = sum(map(estimated_size, reading.entries))
        if group and (entries + len(reading.entries) > merge_entries or size + more > merge_bytes):
            yield group
            group, entries, size = [], 0, 0
        group.append((part, reading))
        entries += len(reading.entries)
        size += more
    if group:
        yield group


def _merge(journal: Journal, run: str, group: _Readings) -> CompactionResult:
    by_row: dict[str, list[Entry]] = defaultdict(list)
    for _, reading in group:
        for entry in reading.entries:
            by_row[entry.key.text].append(entry)
    kept = [entry for entries in by_row.values() for entry in settle_entries(entries).entries]
    if kept:
        journal.write(run, kept, merged=True)
    deleted = sum(journal.delete(part) for part, _ in group)
    return CompactionResult(
        read=len(group), written=int(bool(kept)), deleted=deleted, entries_written=len(kept),
        entries_read=sum(len(reading.entries) for _, reading in group))
