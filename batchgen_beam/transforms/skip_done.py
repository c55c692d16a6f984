"""Rows whose answers earlier runs have found: joined with the journal by row key before anything is tokenized.

Owns the join and what is counted about it.  Does not know how parts are stored (`batchgen_beam.storage.journal`), what
several entries of a row come to (`batchgen_beam.storage.settling`), nor how text is made of token ids.
Only entries of rows that are here cross the shuffle: each reader of a part knows the hashes of all rows, 8 bytes a row.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import apache_beam as beam
import numpy as np
from apache_beam.pvalue import AsSingleton, TaggedOutput
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from batchgen_beam.errors import ErrorCode
from batchgen_beam.records import Answer, ContinuationRecord, InputRow
from batchgen_beam.storage.journal import Hashes, Journal, Part
from batchgen_beam.storage.settling import Entry, settle_entries
from batchgen_beam.storage.totals import RunTotals
from batchgen_beam.transforms.exchange import GroupParcels, bucket_count
from batchgen_beam.transforms.host import HostHandle
from batchgen_beam.transforms.lanes import hash_range
from batchgen_beam.transforms.wire import unpack

__all__ = ["SkipDone", "SkipOutputs"]

LOG = logging.getLogger(__name__)

ROWS = "rows"
RESUMED = "resumed"
ANSWERS = "answers"
ENTRIES = "entries"
TOTALS = "totals"

PIECE_BYTES = 4 << 20
"""A part is read in pieces of about this size, as stored, so that memory does not follow the part."""


class SkipOutputs(NamedTuple):
    """Rows to compute; ContinuationRecords of rows to go on with; (row key text, Answer) of the others; RunTotals."""

    rows: beam.PCollection
    resumed: beam.PCollection
    answers: beam.PCollection
    totals: beam.PCollection


class GatherHashes(beam.CombineFn):
    """InputRows -> the hashes of their keys, ascending, as the bytes of 64-bit integers of this machine."""

    def create_accumulator(self) -> array[int]:
        """No hash."""
        return array("Q")

    def add_input(self, accumulator: array[int], element: InputRow) -> array[int]:
        """One more row."""
        accumulator.append(element.key.hash64)
        return accumulator

    def merge_accumulators(self, accumulators: Iterable[array[int]]) -> array[int]:
        """Partial sets together."""
        merged = array("Q")
        for part in accumulators:
            merged.extend(part)
        return merged

    def extract_output(self, accumulator: array[int]) -> bytes:
        """Each hash once."""
        return np.unique(np.frombuffer(accumulator, np.uint64)).tobytes()


class ReadPart(beam.DoFn):
    """A part of the journal -> (row key text, Entry) of the rows that are wanted, and a count if it can't be read."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def process(self, part: Part, wanted: bytes) -> Iterator[tuple[str, Entry] | TaggedOutput]:
        """`wanted` is what `GatherHashes` gives."""
        problem = None
        for low, high in _pieces(part):
            here = _within(wanted, low, high)
            if not len(here):
                continue
            reading = self._journal.entries(part, low=low, high=high, only=here)
            problem = problem or reading.problem
            for reason in reading.ignored:
                LOG.warning("a continuation in %s is ignored: %s", part.path, reason)
            for entry in reading.entries:
                yield entry.key.text, entry
        if problem is not None:
            LOG.warning("%s", problem)
            yield TaggedOutput(TOTALS, RunTotals(journal_problems=1))


def _pieces(part: Part) -> list[tuple[int, int]]:
    count = part.size // PIECE_BYTES + 1
    return [hash_range(index, count) for index in range(count)]


def _within(wanted: bytes, low: int, high: int) -> Hashes:
    hashes: Hashes = np.frombuffer(wanted, np.uint64)
    first, last = np.searchsorted(hashes, np.uint64(low)), np.searchsorted(hashes, np.uint64(high - 1), "right")
    return hashes[first:last]


class JoinRow(beam.DoFn):
    """All rows and all entries of one key; entries without row are of rows that were edited or have left the input."""

    def __init__(self, retry: frozenset[ErrorCode], handle: HostHandle) -> None:
        self._retry = retry
        self._handle = handle

    def setup(self) -> None:
        """The process's tokenizer."""
        self._host = self._handle.acquire()
        self._wording = self._host.wording()

    def start_bundle(self) -> None:
        """Counts are of one bundle."""
        self._reused = 0
        self._resumed = 0

    def process(self, group: tuple[str, Iterable[bytes]]) -> Iterator[InputRow | TaggedOutput]:
        """The answers, the continuation, or the rows as they came."""
        text, packed = group
        parcels = [unpack(parcel) for parcel in packed]
        rows = [parcel for parcel in parcels if isinstance(parcel, InputRow)]
        if not rows:
            return
        settled = settle_entries((entry for entry in parcels if not isinstance(entry, InputRow)), retry=self._retry)
        if settled.answers:
            self._reused += len(rows)
            self._host.tally.reuse(len(rows))
            for answer in settled.answers:
                yield TaggedOutput(ANSWERS, (text, self._wording.answer(answer)))
        elif settled.record is not None:
            self._resumed += len(rows)
            yield TaggedOutput(RESUMED, settled.record)
        else:
            yield from rows

    def finish_bundle(self) -> Iterator[TaggedOutput]:
        """What the bundle comes to."""
        if self._reused or self._resumed:
            window = GlobalWindow()
            totals = RunTotals(reused=self._reused, resumed=self._resumed)
            yield TaggedOutput(TOTALS, WindowedValue(totals, window.start, [window]))


def _keyed(row: InputRow) -> tuple[str, InputRow]:
    return row.key.text, row


class SkipDone(beam.PTransform):
    """InputRow -> SkipOutputs.

    `parts` are those of the journal to look into, `retry` the codes of final failures that count as absent.  `rows` is
    the expected number of rows, where it is known.
    """

    def __init__(self, journal: Journal, parts: Sequence[Part], handle: HostHandle, *,
                 retry: frozenset[ErrorCode] = frozenset(), rows: int | None = None) -> None:
        super().__init__()
        self._journal = journal
        self._parts = parts
        self._buckets = bucket_count(rows)
        self._join = JoinRow(retry, handle)

    def expand(self, rows: beam.PCollection) -> SkipOutputs:
        """See the class."""
        keyed = rows | "Keyed" >> beam.Map(_keyed).with_output_types(tuple[str, InputRow])
        entries = self._entries(rows)
        join = beam.ParDo(self._join).with_output_types(
            InputRow, resumed=ContinuationRecord, answers=tuple[str, Answer], totals=RunTotals)
        joined = (
            (keyed, entries[ENTRIES])
            | "ByRowKey" >> GroupParcels(buckets=self._buckets)
            | "JoinRow" >> join.with_outputs(RESUMED, ANSWERS, TOTALS, main=ROWS))
        totals = (joined[TOTALS], entries[TOTALS]) | "Totals" >> beam.Flatten()
        return SkipOutputs(joined[ROWS], joined[RESUMED], joined[ANSWERS], totals)

    def _entries(self, rows: beam.PCollection) -> beam.pvalue.DoOutputsTuple:
        wanted = rows | "Hashes" >> beam.CombineGlobally(GatherHashes()).with_output_types(bytes)
        read = beam.ParDo(ReadPart(self._journal), AsSingleton(wanted)).with_output_types(
            tuple[str, Entry], totals=RunTotals)
        return (
            rows.pipeline
            | "Parts" >> beam.Create(self._parts)
            | "Spread" >> beam.Reshuffle()
            | "ReadPart" >> read.with_outputs(TOTALS, main=ENTRIES))
