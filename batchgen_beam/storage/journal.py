"""The journal: what runs found out, in parts that are written once and read by whoever needs them.

Owns the layout below `_journal/<content print>/`, the listing, and the reading that touches only the row groups it
needs.  Does not know when parts are written or merged, nor what the entries of a row come to.  A part that is torn,
foreign, of a later release or gone is a problem in words, never an error: its rows are computed again, with the same
bits.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen_beam.storage.files import join, list_stored, normalise_uri, open_stored, remove, write_atomically
from batchgen_beam.storage.journal_rows import HASH, check_part_schema, decode_rows, encode_entries
from batchgen_beam.storage.settling import Entry
from batchgen_beam.storage.store_errors import store_errors

__all__ = ["ALL_HASHES", "JOURNAL_FOLDER", "MERGED", "HashReading", "Hashes", "Journal", "Part", "PartReading",
           "UnreadablePart", "are_among", "run_of"]

JOURNAL_FOLDER = "_journal"
ALL_HASHES = 1 << 64
"""The end of the range of `RowKey.hash64`."""
MERGED = "merged-"
_RUN = "run="

Hashes = np.ndarray[Any, np.dtype[np.uint64]]


class UnreadablePart(Exception):
    """Why a part is skipped; never leaves the package's storage."""


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """A file of the journal: its normalised URI, bytes, and seconds since the epoch, 0.0 where those are not known."""

    path: str
    run: str
    size: int
    modified: float


@dataclass(frozen=True, slots=True)
class PartReading:
    """What a part says.  `problem` says why nothing could be read; `ignored` why single continuations could not."""

    entries: tuple[Entry, ...] = ()
    problem: str | None = None
    ignored: tuple[str, ...] = ()


class HashReading(NamedTuple):
    """Which rows a part speaks of.  `problem` says why nothing could be read."""

    hashes: Hashes
    problem: str | None = None


def _skipped(part: Part, error: UnreadablePart) -> str:
    return f"journal part {part.path} is skipped: {error}"


def run_of(path: str) -> str:
    """The run whose folder holds this file of the journal."""
    return path.rsplit("/", 2)[-2].removeprefix(_RUN)


@dataclass(frozen=True, slots=True)
class Journal:
    """The parts of one content print below an output folder."""

    folder: str

    @classmethod
    def of(cls, output: str, content: str) -> Journal:
        """The journal of an output folder for the content print with this digest."""
        return cls(join(output, JOURNAL_FOLDER, content))

    def run_folder(self, run: str) -> str:
        """Where one run keeps its files."""
        return join(self.folder, f"{_RUN}{run}")

    def parts(self) -> list[Part]:
        """All parts there are now, by path."""
        stored = list_stored(self.folder, f"{_RUN}*/*.parquet")
        return [Part(file.uri, run_of(file.uri), file.size, file.modified) for file in stored]

    def write(self, run: str, entries: Iterable[Entry], *, merged: bool = False) -> Part:
        """Store entries as one new part under a name that nobody else uses; `parts` will say when that was."""
        data = encode_entries(entries)
        path = join(self.run_folder(run), f"{MERGED if merged else ''}{uuid.uuid4()}.parquet")
        write_atomically(path, data)
        return Part(normalise_uri(path), run, len(data), 0.0)

    def hashes(self, part: Part, low: int = 0, high: int = ALL_HASHES) -> HashReading:
        """The key hashes of the part's rows in [low, high), ascending, with repeats.

        Reads one column of the row groups that have any.
        """
        try:
            with _opened(part) as file:
                return HashReading(_file_hashes(file, low, high))
        except UnreadablePart as error:
            return HashReading(np.empty(0, np.uint64), _skipped(part, error))

    def entries(self, part: Part, *, low: int = 0, high: int = ALL_HASHES, only: Hashes | None = None) -> PartReading:
        """The entries whose key hash is in [low, high) and, where it is given, in `only` (ascending)."""
        found: list[Entry] = []
        ignored: list[str] = []
        try:
            with _opened(part) as file:
                for group in _matching_groups(file.metadata, low, high, only):
                    marked = _marked(_group_hashes(file, group), low, high, only)
                    if marked.any():
                        decoded = decode_rows(file.read_row_group(group), marked)
                        found.extend(decoded.entries)
                        ignored.extend(decoded.ignored)
        except UnreadablePart as error:
            return PartReading(problem=_skipped(part, error))
        return PartReading(tuple(found), None, tuple(ignored))

    def delete(self, part: Part) -> bool:
        """Delete a part; whether it was still there."""
        return remove(part.path)


@contextmanager
def _opened(part: Part) -> Iterator[pq.ParquetFile]:
    """The file, its pages checked against their checksums; whatever is wrong with it is an `UnreadablePart`."""
    try:
        with open_stored(part.path) as handle, pq.ParquetFile(handle, page_checksum_verification=True) as file:
            check_part_schema(file.schema_arrow)
            yield file
    except FileNotFoundError as error:
        raise UnreadablePart("it is gone, perhaps merged by another run") from error
    except (pa.ArrowException, ValueError, *store_errors()) as error:  # torn, or unreachable
        raise UnreadablePart(next(iter(str(error).splitlines()), repr(error))) from error


def _matching_groups(metadata: pq.FileMetaData, low: int, high: int, only: Hashes | None) -> Iterator[int]:
    """Row groups that may hold such a hash, by their statistics."""
    for group in range(metadata.num_row_groups):
        statistics = metadata.row_group(group).column(0).statistics
        if statistics is None:  # a group without rows
            continue
        first, last = max(statistics.min, low), min(statistics.max, high - 1)
        if first <= last and (only is None or _any_between(only, first, last)):
            yield group


def _any_between(ascending: Hashes, first: int, last: int) -> bool:
    begin = np.searchsorted(ascending, np.uint64(first), "left")
    return bool(begin < np.searchsorted(ascending, np.uint64(last), "right"))


def _group_hashes(file: pq.ParquetFile, group: int) -> Hashes:
    values: Hashes = file.read_row_group(group, columns=[HASH]).column(0).to_numpy()
    return values


def _file_hashes(file: pq.ParquetFile, low: int, high: int) -> Hashes:
    groups = [_group_hashes(file, group) for group in _matching_groups(file.metadata, low, high, None)]
    found = np.concatenate([np.empty(0, np.uint64), *groups])
    inside: Hashes = found[_marked(found, low, high, None)]
    return inside


def _marked(hashes: Hashes, low: int, high: int, only: Hashes | None) -> np.ndarray[Any, np.dtype[np.bool_]]:
    inside = (hashes >= np.uint64(low)) & (hashes <= np.uint64(high - 1))
    return inside if only is None else inside & are_among(hashes, only)


def are_among(hashes: Hashes, ascending: Hashes) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """For each hash, whether it is in an ascending array: by binary search, for that array may be of a whole run."""
    places = np.searchsorted(ascending, hashes)
    inside = places < len(ascending)
    inside[inside] = ascending[places[inside]] == hashes[inside]
    return inside
