"""The encoding of entries: every bit comes back, in an order and in row groups that readers rely on."""

from __future__ import annotations

import io
import random
from collections.abc import Sequence

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen_beam.records import ContinuationRecord, Outcome
from batchgen_beam.storage.journal_rows import (
    PART_SCHEMA,
    ROW_GROUP_ROWS,
    Decoded,
    check_part_schema,
    decode_rows,
    encode_entries,
    estimated_size,
)
from batchgen_beam.storage.settling import Entry
from tests.storage.entries import bits, failure, failures, logprobs_of, outcome, outcomes, record, records


def decoded(data: bytes) -> Decoded:
    """All rows of a part."""
    table = pq.read_table(io.BytesIO(data))
    return decode_rows(table, np.ones(table.num_rows, np.bool_))


@settings(max_examples=80, deadline=None)
@given(st.lists(outcomes() | records() | failures(), max_size=6))
def test_every_entry_comes_back_bit_for_bit(entries: Sequence[Entry]) -> None:
    """Keys, numbers, texts, parameters and the bits of log-probabilities, NaNs and -0.0 too; nothing is ignored."""
    found = decoded(encode_entries(entries))
    assert sorted(map(bits, found.entries)) == sorted(map(bits, entries))
    assert found.ignored == ()


def test_the_text_of_an_answer_stays_behind() -> None:
    """It follows from the ids."""
    [found] = decoded(encode_entries([outcome(1, text="long")])).entries
    assert isinstance(found, Outcome)
    assert found.text is None


def test_rows_are_sorted_and_grouped_by_the_hash_of_their_key() -> None:
    """Row groups have at most 1,024 rows and statistics on the hash that overlap in at most one value."""
    entries = [outcome(index) for index in range(2500)]
    random.Random(3).shuffle(entries)
    file = pq.ParquetFile(io.BytesIO(encode_entries(entries)))
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    assert [group.num_rows for group in groups] == [ROW_GROUP_ROWS, ROW_GROUP_ROWS, 2500 - 2 * ROW_GROUP_ROWS]
    hashes = file.read().column("hash").to_pylist()
    assert hashes == sorted(entry.key.hash64 for entry in entries)
    assert max(hashes) >= 2**63, "values above the signed range are in the test"
    stats = [group.column(0).statistics for group in groups]
    assert [(s.min, s.max) for s in stats] == [(hashes[0], hashes[1023]), (hashes[1024], hashes[2047]),
                                               (hashes[2048], hashes[-1])]


def test_unreadable_continuations_are_ignored_and_unreadable_answers_are_not() -> None:
    """A row can start over where its record is of another version; an answer that can't be read voids its part."""
    table = pq.read_table(io.BytesIO(encode_entries([record(1), outcome(2)])))
    rows = table.to_pylist()
    for row in rows:
        row["payload"] = row["payload"][:4] + b"\x63\x00" + row["payload"][6:]
    changed = table.from_pylist(rows, schema=PART_SCHEMA)
    kinds = np.array([row["kind"] == "continuation" for row in rows])
    assert decode_rows(changed, kinds) == Decoded((), (
        "continuation record of version 99, this release reads 1",))
    with pytest.raises(ValueError, match="journalled outcome of version 99, this release reads 1"):
        decode_rows(changed, ~kinds)


def test_other_schemas_are_refused_by_reason() -> None:
    """No part, a later version, and a part with other columns are told apart."""
    check_part_schema(PART_SCHEMA)
    with pytest.raises(ValueError, match="no part of a journal"):
        check_part_schema(PART_SCHEMA.remove_metadata())
    with pytest.raises(ValueError, match="version 2, this release reads 1"):
        check_part_schema(PART_SCHEMA.with_metadata({"batchgen_journal": "2"}))
    with pytest.raises(ValueError, match="columns"):
        check_part_schema(PART_SCHEMA.remove(1))


def test_the_estimate_is_about_the_size_before_compression() -> None:
    """Within a factor of two for short and long entries, so that parts and buffers have the sizes they should."""
    long = outcome(1, 2000, logprobs=logprobs_of(2000, 20))
    for entry in (outcome(1), long, record(1, 3000), failure(1, message="m" * 5000)):
        table = pq.read_table(io.BytesIO(encode_entries([entry])))
        assert table.nbytes / 2 < estimated_size(entry) < table.nbytes * 2


def test_a_continuation_is_its_own_record() -> None:
    """The journal keeps `ContinuationRecord.to_bytes` as it is, so that both have one version."""
    [row] = pq.read_table(io.BytesIO(encode_entries([record(4)]))).to_pylist()
    assert ContinuationRecord.from_bytes(row["payload"]) == record(4)
