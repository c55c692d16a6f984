"""Answers in order to the two files of an output unit.

Owns the conversion of records to the frozen schemas and the writing, removal and setting aside of units' files.  Does
not know how answers found their unit, which units a run has, nor Beam's transforms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen_beam.records import Failure, Outcome, OutputUnit, TokenLogprobs
from batchgen_beam.storage.arrow_values import storable_text
from batchgen_beam.storage.files import exists, join, list_below, move, remove, write_atomically
from batchgen_beam.storage.schemas import FAILURE_SCHEMA, LOGPROBS, RESULT_SCHEMA
from batchgen_beam.storage.unit_records import forget_record, recorded_names
from batchgen_beam.storage.units import FAILURES, RESULTS, UNIT_FILES, PlacedAnswer, published_name

__all__ = ["STALE_FOLDER", "PublishedUnit", "failures_table", "is_published", "publish_unit", "published_names",
           "remove_published", "results_table", "set_aside", "stale_folder"]

STALE_FOLDER = "_stale"

Column = Any
"""What pyarrow makes an array of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedUnit:
    """A unit whose answers stand in input order, each with the index of its row among the unit's rows."""

    unit: OutputUnit
    model: str
    placed: Sequence[PlacedAnswer]
    kept: bytes = b""

    def outcomes(self) -> Iterator[tuple[int, PlacedAnswer, Outcome]]:
        """(Index of the row in the unit, its place, outcome), by row and choice."""
        for index, place in enumerate(self.placed):
            for answer in place.answers:
                if isinstance(answer, Outcome):
                    yield index, place, answer

    def failures(self) -> Iterator[tuple[PlacedAnswer, Failure]]:
        """Rows without answer, in order."""
        for place in self.placed:
            for answer in place.answers:
                if isinstance(answer, Failure):
                    yield place, answer


def publish_unit(output: str, published: PublishedUnit) -> None:
    """Write the unit's files; one that would have no rows is removed where an earlier run left it."""
    name = published_name(published.unit)
    for folder, table in ((RESULTS, results_table(published)), (FAILURES, failures_table(published))):
        path = join(output, folder, name)
        if table.num_rows:
            write_atomically(path, _parquet_bytes(table))
        else:
            remove(path)


def remove_published(output: str) -> int:
    """Delete every published unit of an output folder with its record; how many files there were."""
    for name in recorded_names(output):
        forget_record(output, name)
    return sum(remove(join(output, kind, name)) for kind in (RESULTS, FAILURES) for name in _names(output, kind))


def _names(output: str, kind: str) -> list[str]:
    return list_below(join(output, kind), UNIT_FILES)


def published_names(output: str) -> list[str]:
    """The `published_name` of every unit that has a file in the folder, sorted."""
    return sorted({name for kind in (RESULTS, FAILURES) for name in _names(output, kind)})


def is_published(output: str, name: str) -> bool:
    """Whether the unit of this `published_name` has a file."""
    return any(exists(join(output, kind, name)) for kind in (RESULTS, FAILURES))


def stale_folder(output: str, run: str) -> str:
    """Where a run puts the units that it found and that are not its own; laid out as the output folder itself."""
    return join(output, STALE_FOLDER, run)


def set_aside(output: str, run: str, name: str) -> None:
    """Move what is published of a unit to the run's `stale_folder`; its record goes."""
    forget_record(output, name)
    for kind in (RESULTS, FAILURES):
        move(join(output, kind, name), join(stale_folder(output, run), kind, name))


def _parquet_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    data: bytes = sink.getvalue().to_pybytes()
    return data


def results_table(published: PublishedUnit) -> pa.Table:
    """Outcomes by the frozen schema, then the kept columns of their rows."""
    rows = list(published.outcomes())
    columns = {**_own_columns(published, rows), **_parameter_columns([outcome for _, _, outcome in rows])}
    arrays = [_array(columns[field.name], field.type) for field in RESULT_SCHEMA]
    table = pa.Table.from_arrays(arrays, schema=RESULT_SCHEMA)
    if not published.kept:
        return table
    kept = pa.ipc.open_stream(published.kept).read_all().take(pa.array([index for index, _, _ in rows], pa.int64()))
    for field in kept.schema:
        table = table.append_column(field, kept.column(field.name))
    return table


def _own_columns(published: PublishedUnit, rows: Sequence[tuple[int, PlacedAnswer, Outcome]]) -> dict[str, Column]:
    outcomes = [outcome for _, _, outcome in rows]
    return {
        "uuid": [o.key.uuid for o in outcomes],
        "occurrence": [place.occurrence for _, place, _ in rows],
        "choice_index": [o.choice_index for o in outcomes],
        "text": [None if o.text is None else storable_text(o.text) for o in outcomes],
        "token_ids": _token_lists(outcomes),
        "finish_reason": [str(o.finish_reason) for o in outcomes],
        "stop_reason": [None if o.stop_reason is None else storable_text(str(o.stop_reason)) for o in outcomes],
        "prompt_tokens": [o.prompt_tokens for o in outcomes],
        "cached_tokens": [o.cached_tokens for o in outcomes],
        "completion_tokens": [o.completion_tokens for o in outcomes],
        "logprobs": logprobs_array([o.logprobs for o in outcomes]),
        "model": [published.model] * len(outcomes),
        "content_print": [o.content_print for o in outcomes],
        "numeric_print": [o.numeric_print for o in outcomes],
        "queue_seconds": [o.queue_seconds for o in outcomes],
        "generate_seconds": [o.generate_seconds for o in outcomes],
        **_position_columns(published.unit, [place for _, place, _ in rows]),
    }


def _parameter_columns(outcomes: Sequence[Outcome]) -> dict[str, Column]:
    params = [o.params for o in outcomes]
    return {
        "temperature": [p.temperature for p in params],
        "top_k": [p.top_k for p in params],
        "top_p": [p.top_p for p in params],
        "max_tokens": [p.max_tokens for p in params],
        "seed": [p.seed - 2**64 if p.seed >= 2**63 else p.seed for p in params],
    }


def _position_columns(unit: OutputUnit, placed: Sequence[PlacedAnswer]) -> dict[str, Column]:
    return {
        "shard": [unit.shard] * len(placed),
        "row_group": [unit.row_group] * len(placed),
        "row": [place.row for place in placed],
    }


def failures_table(published: PublishedUnit) -> pa.Table:
    """Failures by the frozen schema."""
    rows = list(published.failures())
    columns: dict[str, Column] = {
        "uuid": [failure.key.uuid for _, failure in rows],
        "occurrence": [place.occurrence for place, _ in rows],
        "code": [str(failure.code) for _, failure in rows],
        "message": [storable_text(failure.message) for _, failure in rows],
        "prompt_head": [storable_text(failure.prompt_head) for _, failure in rows],
        **_position_columns(published.unit, [place for place, _ in rows]),
    }
    arrays = [_array(columns[field.name], field.type) for field in FAILURE_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=FAILURE_SCHEMA)


def _array(column: Column, kind: pa.DataType) -> pa.Array:
    return column if isinstance(column, pa.Array) else pa.array(column, kind)


def _offsets(lengths: Sequence[int] | np.ndarray[Any, Any]) -> pa.Array:
    return pa.array(np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]), pa.int32())


def _joined(parts: Sequence[Any], kind: type) -> np.ndarray[Any, Any]:
    return np.concatenate([np.frombuffer(part, kind) for part in parts]) if parts else np.empty(0, kind)


def _token_lists(outcomes: Sequence[Outcome]) -> pa.Array:
    ids = pa.array(_joined([o.token_ids for o in outcomes], np.int32))
    return pa.ListArray.from_arrays(_offsets([len(o.token_ids) for o in outcomes]), ids)


def logprobs_array(entries: Sequence[TokenLogprobs]) -> pa.Array:
    """One list for each outcome, of type `LOGPROBS`, without a Python object for each token."""
    widths = np.repeat([e.width for e in entries], [len(e.chosen) for e in entries])
    tops = pa.StructArray.from_arrays(
        [pa.array(_joined([e.top_ids for e in entries], np.int32)), _finite([e.top for e in entries])],
        fields=list(LOGPROBS.value_type.field("top").type.value_type))
    top_lists = pa.ListArray.from_arrays(_offsets(widths), tops, type=LOGPROBS.value_type.field("top").type)
    tokens = pa.StructArray.from_arrays([_finite([e.chosen for e in entries]), top_lists],
                                        fields=list(LOGPROBS.value_type))
    return pa.ListArray.from_arrays(_offsets([len(e.chosen) for e in entries]), tokens, type=LOGPROBS)


def _finite(parts: Sequence[Any]) -> pa.Array:
    values = _joined(parts, np.float32)
    return pa.array(values, mask=~np.isfinite(values))
