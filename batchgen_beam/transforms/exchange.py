"""A shuffle for very many small values: grouped by text key, moved in compressed chunks.

Owns the chunks and buckets.  Does not know what the values mean (`batchgen_beam.transforms.wire` packs them).
Runners pay for every element of a shuffle, and local ones hold it in memory several times over.  So values travel in
chunks under a bucket of keys, and the receiver of a bucket splits it by key.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import apache_beam as beam
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from batchgen_beam.transforms.wire import Parcel, open_sealed, pack, seal

__all__ = ["GroupParcels", "bucket_count"]

CHUNK_BYTES = 1 << 20
BUNDLE_BYTES = 16 << 20
"""So much of a bundle may wait, over all buckets, before everything is sent."""

ROWS_PER_BUCKET = 1000
MAX_BUCKETS = 1 << 14
UNKNOWN_BUCKETS = 1 << 10
_OVERHEAD = 100


def bucket_count(rows: int | None) -> int:
    """How many buckets to spread `rows` (None: unknown) row keys over."""
    return UNKNOWN_BUCKETS if rows is None else min(max(rows // ROWS_PER_BUCKET, 1), MAX_BUCKETS)


@dataclass(slots=True)
class _Chunk:
    """Values of one bucket that wait for company."""

    entries: list[tuple[str, bytes]] = field(default_factory=list)
    size: int = 0

    def add(self, key: str, value: bytes) -> int:
        added = len(key) + len(value) + _OVERHEAD
        self.entries.append((key, value))
        self.size += added
        return added

    def sealed(self) -> bytes:
        return seal(self.entries)


class PackChunks(beam.DoFn):
    """(text, Parcel) -> (bucket, chunk).  `buckets` None: every key is its own bucket."""

    def __init__(self, buckets: int | None) -> None:
        self._buckets = buckets

    def start_bundle(self) -> None:
        """No value outlives its bundle here."""
        self._chunks: dict[str, _Chunk] = {}
        self._waiting = 0

    def process(self, keyed: tuple[str, Parcel]) -> Iterator[tuple[str, bytes]]:
        """The bucket's chunk once it is full, all of them once together they are too much."""
        key, parcel = keyed
        bucket = key if self._buckets is None else str(zlib.crc32(key.encode()) % self._buckets)
        chunk = self._chunks.setdefault(bucket, _Chunk())
        self._waiting += chunk.add(key, pack(parcel))
        if self._waiting >= BUNDLE_BYTES:
            yield from self._flush(list(self._chunks))
        elif chunk.size >= CHUNK_BYTES:
            yield from self._flush([bucket])

    def finish_bundle(self) -> Iterator[WindowedValue]:
        """What is left."""
        window = GlobalWindow()
        for keyed in self._flush(list(self._chunks)):
            yield WindowedValue(keyed, window.start, [window])

    def _flush(self, buckets: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        for bucket in buckets:
            chunk = self._chunks.pop(bucket)
            self._waiting -= chunk.size
            yield bucket, chunk.sealed()


class SplitBucket(beam.DoFn):
    """(bucket, chunks) -> (text, packed parcels) for every key in it, keys sorted."""

    def process(self, group: tuple[str, Iterable[bytes]]) -> Iterator[tuple[str, list[bytes]]]:
        """See the class."""
        by_key: dict[str, list[bytes]] = {}
        for chunk in group[1]:
            for key, value in open_sealed(chunk):
                by_key.setdefault(key, []).append(value)
        for key in sorted(by_key):
            yield key, by_key.pop(key)


class GroupParcels(beam.PTransform):
    """Collections of (text, Parcel) -> (text, the packed parcels of all collections under it), in no order."""

    def __init__(self, *, buckets: int | None = None) -> None:
        super().__init__()
        self._buckets = buckets

    def expand(self, inputs: Sequence[beam.PCollection]) -> beam.PCollection:
        """See the class."""
        chunks = tuple(
            side | f"PackChunks{number}" >> beam.ParDo(PackChunks(self._buckets)).with_output_types(tuple[str, bytes])
            for number, side in enumerate(inputs))
        return (chunks
                | "Together" >> beam.Flatten()
                | "ByBucket" >> beam.GroupByKey()
                | "SplitBucket" >> beam.ParDo(SplitBucket()))
