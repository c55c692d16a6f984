"""Entries of the journal as the rows of one part, and back.

Owns the encoding, which is durable: a part is a Parquet file with the columns of `PART_SCHEMA`, sorted by `hash`, in
row groups of at most 1,024 rows whose statistics on `hash` say what a reader needs.  A payload is a versioned record
(see `record_codec`), its numbers little-endian, the bits of log-probabilities as they are.  Does not know where parts
are kept.  Outcomes leave their text behind: it follows from their ids and the tokenizer, which the content print
covers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen_beam.errors import ErrorCode
from batchgen_beam.record_codec import RecordFormat
from batchgen_beam.records import (
    ContinuationRecord,
    Failure,
    FinishReason,
    Outcome,
    RowKey,
    SamplingParams,
    TokenLogprobs,
)
from batchgen_beam.storage.settling import Entry

__all__ = ["HASH", "PART_SCHEMA", "PART_VERSION", "ROW_GROUP_ROWS", "Decoded", "check_part_schema", "decode_rows",
           "encode_entries", "estimated_size"]

PART_VERSION = 1
ROW_GROUP_ROWS = 1024
HASH = "hash"

_VERSION_KEY = b"batchgen_journal"
_OUTCOME, _FAILURE, _CONTINUATION = "outcome", "failure", "continuation"


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


PART_SCHEMA = pa.schema([
    _required(HASH, pa.uint64()),
    _required("key", pa.string()),
    _required("kind", pa.string()),
    _required("choice_index", pa.int32()),
    _required("payload", pa.binary()),
], metadata={_VERSION_KEY: str(PART_VERSION).encode()})
"""`hash` is `RowKey.hash64`, `kind` one of outcome, failure, continuation; a failure's `choice_index` is 0."""

_OUTCOMES = RecordFormat("journalled outcome", b"BGJO", 1, "ifif")
_FAILURES = RecordFormat("journalled failure", b"BGJF", 1, "")


@dataclass(frozen=True, slots=True)
class Decoded:
    """The entries of some rows.  `ignored` says of each continuation that this release can't read what is wrong."""

    entries: tuple[Entry, ...] = ()
    ignored: tuple[str, ...] = ()


def encode_entries(entries: Iterable[Entry]) -> bytes:
    """The bytes of one part; its rows are sorted, whatever the order of the entries."""
    rows = sorted(((entry.key.hash64, entry) for entry in entries), key=lambda row: row[0])
    encoded = [_encoded(entry) for _, entry in rows]
    columns = [
        [hash64 for hash64, _ in rows],
        [entry.key.text for _, entry in rows],
        [kind for kind, _ in encoded],
        [0 if isinstance(entry, Failure) else entry.choice_index for _, entry in rows],
        [payload for _, payload in encoded],
    ]
    arrays = [pa.array(values, field.type) for values, field in zip(columns, PART_SCHEMA, strict=True)]
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.Table.from_arrays(arrays, schema=PART_SCHEMA), sink, compression="zstd", row_group_size=ROW_GROUP_ROWS,
        use_dictionary=["kind"], write_statistics=[HASH], write_page_checksum=True)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def estimated_size(entry: Entry) -> int:
    """About how many bytes an entry takes before compression, found without encoding it."""
    if isinstance(entry, Failure):
        return 300 + len(entry.message) + len(entry.prompt_head)
    logprobs = entry.logprobs
    tokens = (len(entry.token_ids) if isinstance(entry, Outcome)
              else len(entry.prompt_ids) + len(entry.generated_ids))
    return 700 + 4 * (tokens + len(logprobs.chosen) + 2 * len(logprobs.top))


def _encoded(entry: Entry) -> tuple[str, bytes]:
    if isinstance(entry, Outcome):
        return _OUTCOME, _encode_outcome(entry)
    if isinstance(entry, Failure):
        facts = {"code": entry.code.value, "message": entry.message, "prompt_head": entry.prompt_head,
                 "poison": entry.poison}
        return _FAILURE, _FAILURES.pack(facts, ())
    return _CONTINUATION, entry.to_bytes()


def _encode_outcome(outcome: Outcome) -> bytes:
    logprobs = outcome.logprobs
    return _OUTCOMES.pack({
        "finish_reason": outcome.finish_reason.value,
        "stop_reason": outcome.stop_reason,
        "prompt_tokens": outcome.prompt_tokens,
        "cached_tokens": outcome.cached_tokens,
        "width": logprobs.width,
        "params": outcome.params.as_facts(),
        "content_print": outcome.content_print,
        "numeric_print": outcome.numeric_print,
        "queue_seconds": outcome.queue_seconds,
        "generate_seconds": outcome.generate_seconds,
    }, (outcome.token_ids, logprobs.chosen, logprobs.top_ids, logprobs.top))


def _decode_outcome(key: RowKey, choice: int, payload: bytes) -> Outcome:
    facts, (tokens, chosen, top_ids, top) = _OUTCOMES.unpack(payload)
    try:
        logprobs = TokenLogprobs(width=facts.pop("width"), chosen=chosen, top_ids=top_ids, top=top)
        return Outcome(
            key=key, choice_index=choice, token_ids=tokens, logprobs=logprobs,
            finish_reason=FinishReason(facts.pop("finish_reason")), params=SamplingParams(**facts.pop("params")),
            **facts)
    except (KeyError, TypeError) as error:
        raise _OUTCOMES.foreign(error) from error


def _decode_failure(key: RowKey, _choice: int, payload: bytes) -> Failure:
    facts, _ = _FAILURES.unpack(payload)
    try:
        return Failure(key=key, code=ErrorCode(facts.pop("code")), **facts)
    except (KeyError, TypeError) as error:
        raise _FAILURES.foreign(error) from error


_DECODERS: dict[str, Callable[[RowKey, int, bytes], Outcome | Failure]] = {
    _OUTCOME: _decode_outcome, _FAILURE: _decode_failure}


def check_part_schema(schema: pa.Schema) -> None:
    """A `ValueError` says why a Parquet file with this schema is no part that this release reads."""
    version = (schema.metadata or {}).get(_VERSION_KEY)
    if version is None:
        raise ValueError("it is no part of a journal")
    if version != str(PART_VERSION).encode():
        raise ValueError(f"it has version {version.decode(errors='replace')}, this release reads {PART_VERSION}")
    if not schema.equals(PART_SCHEMA):
        raise ValueError("its columns are not those of a journal")


def decode_rows(table: pa.Table, rows: np.ndarray[Any, np.dtype[np.bool_]]) -> Decoded:
    """The entries of the rows that are marked; a `ValueError` where an answer can't be read."""
    chosen = table.filter(pa.array(rows))
    entries: list[Entry] = []
    ignored: list[str] = []
    columns = (chosen.column(name).to_pylist() for name in ("key", "kind", "choice_index", "payload"))
    for text, kind, choice, payload in zip(*columns, strict=True):
        if kind == _CONTINUATION:
            record = _decode_continuation(payload, ignored)
            entries.extend([] if record is None else [record])
        elif kind in _DECODERS:
            entries.append(_DECODERS[kind](RowKey.parse(text), choice, payload))
        else:
            raise ValueError(f"a row of unknown kind {kind!r}")
    return Decoded(tuple(entries), tuple(ignored))


def _decode_continuation(payload: bytes, ignored: list[str]) -> ContinuationRecord | None:
    """The record; None where it can't be read, for its row can start over from its prompt."""
    try:
        return ContinuationRecord.from_bytes(payload)
    except ValueError as error:
        ignored.append(str(error))
        return None
