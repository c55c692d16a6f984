"""Rows to lanes: few, long, evenly filled streams of row chunks, the keys of the stateful step.

Owns how many lanes a run has, which lane a row goes to, and the size of a chunk.  Does not know the engine or files.
A row's lane comes from the SHA-256 of its key (`RowKey.hash64`), never from Python's seeded `hash`, so that every
process agrees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import apache_beam as beam
from apache_beam.coders import Coder, registry
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils.windowed_value import WindowedValue

from batchgen_beam.errors import OptionError
from batchgen_beam.records import EngineRow, Prompt, RowKey
from batchgen_beam.transforms.lane_names import MAX_LANES, lane_name
from batchgen_beam.transforms.wire import open_sealed, seal

__all__ = ["CHUNK_BYTES", "CHUNK_ROWS", "PromptChunk", "PromptChunkCoder", "ToLanes", "hash_range", "lane_count",
           "lane_of", "split_chunks"]

CHUNK_ROWS = 256
CHUNK_BYTES = 4 << 20
LANES_PER_SLOT = 4
ROWS_PER_LANE_FACTOR = 10
"""A lane should hold this many times the rows that an engine runs at once: each lane pays its own long tail."""

_TOKEN_BYTES = 4
_ROW_OVERHEAD = 200


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Rows that travel together to one lane."""

    prompts: tuple[EngineRow, ...]


class PromptChunkCoder(Coder):
    """Chunks as compressed pickles: local runners hold every chunk in memory, and once more as state."""

    def encode(self, value: PromptChunk) -> bytes:
        """See `batchgen_beam.transforms.wire`."""
        return seal(value.prompts)

    def decode(self, encoded: bytes) -> PromptChunk:
        """The inverse of `encode`."""
        return PromptChunk(open_sealed(encoded))

    def is_deterministic(self) -> bool:
        """Chunks are values, never keys."""
        return False

    def to_type_hint(self) -> type[PromptChunk]:
        """The type this coder is registered for."""
        return PromptChunk


registry.register_coder(PromptChunk, PromptChunkCoder)


def lane_count(requested: int, *, slots: int, rows: int | None, capacity: int) -> int:
    """How many lanes a run uses.

    `requested` (0: decide here) wins.  Otherwise 4 for each of the runner's `slots`, but fewer where `rows` (None:
    unknown) spread over so many lanes would leave a lane under 10 times the engine's `capacity`.
    """
    if not 0 <= requested <= MAX_LANES:
        raise OptionError(f"--lanes={requested}: between 1 and {MAX_LANES} lanes are supported, 0 lets the job decide")
    if requested:
        return requested
    wanted = LANES_PER_SLOT * slots
    if rows is not None:
        wanted = min(wanted, rows // (ROWS_PER_LANE_FACTOR * capacity))
    return min(max(wanted, 1), MAX_LANES)


def lane_of(key: RowKey, lanes: int) -> str:
    """The lane of a row among `lanes`: each lane has one range of key hashes, as the journal's row groups have."""
    return lane_name(key.hash64 * lanes >> 64)


def hash_range(index: int, lanes: int) -> tuple[int, int]:
    """The key hashes of lane `index` of `lanes`: from the first of them to before the second."""
    return -(-(index << 64) // lanes), -(-((index + 1) << 64) // lanes)


def _weight(row: EngineRow) -> int:
    if isinstance(row, Prompt):
        return _TOKEN_BYTES * len(row.token_ids) + _ROW_OVERHEAD
    logprobs = row.logprobs
    numbers = len(row.prompt_ids) + len(row.generated_ids) + len(logprobs.chosen) + 2 * len(logprobs.top)
    return _TOKEN_BYTES * numbers + _ROW_OVERHEAD


@dataclass(slots=True)
class _Buffer:
    """The rows of one lane that wait for their chunk to fill: at most 256 rows or 4 MiB (a larger row goes alone)."""

    rows: list[EngineRow] = field(default_factory=list)
    weight: int = 0

    def add(self, row: EngineRow) -> PromptChunk | None:
        """Take one more; gives the chunk that it no longer fitted into."""
        fits = len(self.rows) < CHUNK_ROWS and self.weight + _weight(row) <= CHUNK_BYTES
        full = None if fits or not self.rows else self.take()
        self.rows.append(row)
        self.weight += _weight(row)
        return full

    def take(self) -> PromptChunk:
        chunk = PromptChunk(tuple(self.rows))
        self.rows, self.weight = [], 0
        return chunk


class ChunkByLane(beam.DoFn):
    """Rows of one bundle, gathered by lane into chunks."""

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes

    def start_bundle(self) -> None:
        """No row outlives its bundle here."""
        self._buffers: dict[str, _Buffer] = {}

    def process(self, row: EngineRow) -> Iterator[tuple[str, PromptChunk]]:
        """The lane's chunk, once the row no longer fits into it."""
        lane = lane_of(row.key, self._lanes)
        full = self._buffers.setdefault(lane, _Buffer()).add(row)
        if full is not None:
            yield lane, full

    def finish_bundle(self) -> Iterator[WindowedValue]:
        """What is left, lane by lane."""
        window = GlobalWindow()
        for lane, buffer in sorted(self._buffers.items()):
            yield WindowedValue((lane, buffer.take()), window.start, [window])


class ToLanes(beam.PTransform):
    """EngineRow -> (lane, PromptChunk), keys typed as text so that every runner encodes them alike."""

    def __init__(self, lanes: int) -> None:
        super().__init__()
        self._lanes = lanes

    def expand(self, rows: beam.PCollection) -> beam.PCollection:
        """See the class."""
        chunks = beam.ParDo(ChunkByLane(self._lanes)).with_output_types(tuple[str, PromptChunk])
        return rows | "ChunkByLane" >> chunks


def split_chunks(rows: Sequence[EngineRow]) -> Iterator[PromptChunk]:
    """The same rows as chunks within the limits, in order."""
    buffer = _Buffer()
    for row in rows:
        full = buffer.add(row)
        if full is not None:
            yield full
    if buffer.rows:
        yield buffer.take()
