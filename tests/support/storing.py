"""Small inputs, answers without an engine, and the reading and publishing half of the job."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pyarrow.parquet as pq
from apache_beam.testing.test_pipeline import TestPipeline

from batchgen_beam.errors import ErrorCode
from batchgen_beam.records import (
    Answer,
    Failure,
    FinishReason,
    InputRow,
    Outcome,
    RowKey,
    SamplingParams,
    TokenLogprobs,
    float_array,
    token_array,
)
from batchgen_beam.settings import InputColumns
from batchgen_beam.storage.inputs import InputPlan, plan_input, read_task
from batchgen_beam.storage.unit_reader import read_units
from batchgen_beam.storage.unit_records import UnitRecords
from batchgen_beam.storage.units import Manifest, Placement
from batchgen_beam.transforms.finish import CountRepeatedIds, FinishRun
from batchgen_beam.transforms.publish import Publish
from batchgen_beam.transforms.read import ReadOutputs, ReadShards, Reuse
from batchgen_beam.transforms.route import Routed, RouteToUnits

Keyed = tuple[str, Answer]
Tamper = Callable[[Keyed], Iterable[Keyed]]

NOON = 1_700_000_000.0


def noon() -> float:
    """A clock that stands still."""
    return NOON


def local_pipeline() -> beam.Pipeline:
    """A pipeline on the local runner; an error of a step is raised when the block ends."""
    return TestPipeline(runner="FnApiRunner")


def outcome(key: RowKey, **values: Any) -> Outcome:
    """The answer of a row whose text is its own id."""
    given: dict[str, Any] = {
        "key": key, "token_ids": token_array([1, 2, 3]), "finish_reason": FinishReason.STOP, "prompt_tokens": 7,
        "logprobs": TokenLogprobs(chosen=float_array([-0.5, -1.0, -1.5])), "params": SamplingParams(),
        "content_print": "content", "numeric_print": "numeric", "text": f"answer to {key.uuid}"}
    return Outcome(**{**given, **values})


def answer_row(row: InputRow) -> Keyed:
    """A failure for rows with a problem or without prompt, else an outcome that quotes the prompt."""
    prompt = row.values.get("prompt")
    if row.problem is not None or prompt is None:
        failure = Failure(key=row.key, code=ErrorCode.INVALID_ROW, message=row.problem or "no prompt")
        return row.key.text, failure
    return row.key.text, outcome(row.key, text=f"re: {prompt}")


def _as_planned(plan: InputPlan) -> InputPlan:
    return plan


def unchanged(keyed: Keyed) -> Iterator[Keyed]:
    """No tampering."""
    yield keyed


def write_table(path: Path, columns: dict[str, Any], *, row_group_size: int = 1000) -> Path:
    """A Parquet file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def write_lines(path: Path, rows: Iterable[object]) -> Path:
    """A JSON Lines file; text is written as it stands."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read_all(path: Path | str, columns: InputColumns | None = None, *,
             unit_rows: int = 10_000) -> tuple[list[InputRow], list[Placement], list[Manifest]]:
    """Everything that the readers make of an input, without Beam."""
    columns = columns or InputColumns()
    plan = plan_input([str(path)], columns)
    items = [
        item for file in plan.files for task in file.tasks()
        for item in read_units(read_task(task, columns, plan.kept), task.uri, task.row_group, id_column=columns.id,
                               unit_rows=unit_rows)]
    placed = [item for item in items if not isinstance(item, Manifest)]
    manifests = [item for item in items if isinstance(item, Manifest)]
    return [row for row, _ in placed], [placement for _, placement in placed], manifests


def run_storage(patterns: Sequence[Path | str], output: Path, *, columns: InputColumns | None = None,
                unit_rows: int = 10_000, limit: int | None = None, run: str = "run-1",
                answer: Callable[[InputRow], Keyed] = answer_row,
                tamper_plan: Callable[[InputPlan], InputPlan] = _as_planned,
                tamper: Tamper = unchanged, reuse: bool = False, retry: frozenset[ErrorCode] = frozenset(),
                content: str = "content",
                tamper_placed: Callable[[tuple[str, Any]], Iterable[tuple[str, Any]]] | None = None) -> dict[str, Any]:
    """Read, answer, route, publish and finish on the local runner; gives the counts of run.json."""
    columns = columns or InputColumns()
    plan = plan_input([str(pattern) for pattern in patterns], columns, limit=limit)
    records = UnitRecords(output=str(output), content=content, model="fake", run=run, retry=retry)
    with local_pipeline() as pipeline:
        read: ReadOutputs = pipeline | ReadShards(tamper_plan(plan), columns, unit_rows=unit_rows,
                                                  reuse=Reuse(records) if reuse else None)
        answers = (read.rows | beam.Map(answer) | beam.Reshuffle()
                   | beam.FlatMap(tamper).with_output_types(tuple[str, Answer]))
        routed: Routed = (read.placements, answers) | RouteToUnits(rows=plan.rows)
        placed = routed.placed if tamper_placed is None else routed.placed | "Tamper" >> beam.FlatMap(tamper_placed)
        units = ((read.manifests, placed) | Publish(records), read.skipped) | "Units" >> beam.Flatten()
        totals = (units, routed.totals, (read.placements, read.skipped_ids) | CountRepeatedIds())
        _ = totals | FinishRun(str(output), run, {"model": "fake"}, rows=plan.rows, clock=noon)
    report: dict[str, Any] = json.loads((output / "run.json").read_text())["counts"]
    return report
