"""Laws of lanes: every process agrees on a row's lane, lanes fill evenly, chunks stay within their limits."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections import Counter

import apache_beam as beam
import pytest
from apache_beam.testing.util import assert_that

from batchgen_beam.errors import OptionError
from batchgen_beam.records import Prompt, RowKey, SamplingParams, token_array
from batchgen_beam.transforms.lane_names import MAX_LANES, lane_name
from batchgen_beam.transforms.lanes import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    PromptChunk,
    PromptChunkCoder,
    ToLanes,
    lane_count,
    lane_of,
    split_chunks,
)


def _prompt(index: int, tokens: int = 3) -> Prompt:
    key = RowKey(f"row-{index}", hashlib.sha256(str(index).encode()).hexdigest())
    return Prompt(key=key, token_ids=token_array(range(1, tokens + 1)), params=SamplingParams())


def flink_worker(encoded: bytes, workers: int) -> int:
    """Where Flink's batch mode sends an encoded key: Java's Arrays.hashCode, then MathUtils.murmurHash."""
    mask, code = 0xFFFFFFFF, 1
    for byte in encoded:
        code = (31 * code + (byte - 256 if byte > 127 else byte)) & mask
    code = code * 0xCC9E2D51 & mask
    code = (code << 15 | code >> 17) & mask
    code = code * 0x1B873593 & mask
    code = (code << 13 | code >> 19) & mask
    code = (code * 5 + 0xE6546B64) & mask ^ 4
    code = (code ^ code >> 16) * 0x85EBCA6B & mask
    code = (code ^ code >> 13) * 0xC2B2AE35 & mask
    code ^= code >> 16
    return abs(code - (1 << 32) if code >> 31 else code) % workers


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 6, 8, 12, 24])
@pytest.mark.parametrize("framed", [False, True], ids=["bare", "length-prefixed"])
def test_lane_keys_spread_evenly_over_hashing_workers(workers: int, framed: bool) -> None:
    """Any number of lanes, from lane 0 on, differs by at most one lane between two Flink workers."""
    loads: Counter[int] = Counter(dict.fromkeys(range(workers), 0))
    for index in range(MAX_LANES):
        name = lane_name(index).encode()
        loads[flink_worker(bytes([len(name)]) + name if framed else name, workers)] += 1
        assert max(loads.values()) - min(loads.values()) <= 1


def test_lane_names_are_distinct() -> None:
    """No two lanes share a key."""
    assert len({lane_name(index) for index in range(MAX_LANES)}) == MAX_LANES


def test_rows_spread_evenly_over_lanes() -> None:
    """Eight lanes of 8,000 rows hold within 10 % of 1,000 each."""
    loads = Counter(lane_of(_prompt(index).key, 8) for index in range(8000))
    assert len(loads) == 8
    assert all(900 < load < 1100 for load in loads.values())


def test_a_lane_does_not_depend_on_the_process() -> None:
    """Python's hash seed has no say in a row's lane."""
    code = ("from batchgen_beam.records import RowKey; from batchgen_beam.transforms.lanes import lane_of;"
            "print(lane_of(RowKey('row-7', 'd' * 64), 16))")
    command = [sys.executable, "-W", "ignore", "-c", code]
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": "."}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == lane_of(RowKey("row-7", "d" * 64), 16) + "\n"


@pytest.mark.parametrize(("slots", "rows", "capacity", "lanes"), [
    (1, None, 256, 4), (8, None, 256, 32), (8, 10**6, 256, 32), (4, 10 * 256 * 3, 256, 3), (4, 60, 256, 1),
    (1, 0, 256, 1), (1000, None, 256, MAX_LANES)])
def test_number_of_lanes(slots: int, rows: int | None, capacity: int, lanes: int) -> None:
    """Four lanes a slot, but none shorter than ten engine fills; at least one."""
    assert lane_count(0, slots=slots, rows=rows, capacity=capacity) == lanes


def test_the_user_decides_the_number_of_lanes_within_the_table() -> None:
    """--lanes wins over the rule; numbers that the table can't name are refused with the limit."""
    assert lane_count(7, slots=1, rows=10, capacity=256) == 7
    for bad in (-1, MAX_LANES + 1):
        with pytest.raises(OptionError, match=rf"--lanes={bad}.*{MAX_LANES}"):
            lane_count(bad, slots=1, rows=None, capacity=1)


def test_chunks_stay_within_their_limits_and_keep_the_order() -> None:
    """At most 256 rows or 4 MiB of tokens a chunk; a row larger than that goes alone."""
    sizes = [600_000 if index % 5 == 0 else 2_000_000 if index == 7 else 10 for index in range(300)]
    rows = [_prompt(index, tokens) for index, tokens in enumerate(sizes)]
    chunks = list(split_chunks(rows))
    assert [p.key for chunk in chunks for p in chunk.prompts] == [p.key for p in rows]
    for chunk in chunks:
        size = sum(4 * len(p.token_ids) for p in chunk.prompts)
        assert 1 <= len(chunk.prompts) <= CHUNK_ROWS
        assert size <= CHUNK_BYTES or len(chunk.prompts) == 1
    assert max(len(chunk.prompts) for chunk in split_chunks([_prompt(i) for i in range(1000)])) == CHUNK_ROWS


def test_a_chunk_survives_its_coder() -> None:
    """Decoding gives equal rows, in less than 4 bytes a token."""
    chunk = PromptChunk(tuple(_prompt(index, tokens=500) for index in range(100)))
    data = PromptChunkCoder().encode(chunk)
    assert PromptChunkCoder().decode(data) == chunk
    assert len(data) < 100 * 4 * 500


def test_to_lanes_keeps_every_row() -> None:
    """Each prompt reaches exactly one chunk, in its own lane."""
    rows = [_prompt(index) for index in range(1000)]

    def check(elements: list[tuple[str, PromptChunk]]) -> None:
        keyed = sorted((p.key.text, lane) for lane, chunk in elements for p in chunk.prompts)
        assert keyed == sorted((p.key.text, lane_of(p.key, 3)) for p in rows)

    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        assert_that(pipeline | beam.Create(rows) | ToLanes(3), check)
