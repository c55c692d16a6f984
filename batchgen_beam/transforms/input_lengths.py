"""How many rows an input has, and how long their prompts are in the mean.

Owns the sampling: every row is counted, the first ones are tokenized.  Does not know what the figures are for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from batchgen_beam.errors import InputError, RowError
from batchgen_beam.records import InputRow
from batchgen_beam.settings import GenerationDefaults, InputColumns
from batchgen_beam.storage.inputs import InputPlan, plan_input, read_task
from batchgen_beam.storage.jsonl_input import count_lines
from batchgen_beam.storage.unit_reader import read_units
from batchgen_beam.storage.units import Manifest
from batchgen_beam.transforms.model_folder import ModelFolder

__all__ = ["InputLengths", "input_lengths"]

SAMPLE = 256
"""Rows that are tokenized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLengths:
    """All rows, those of them that were tokenized, and the mean tokens of their prompts."""

    rows: int
    sampled: int
    prompt_tokens: float


def input_lengths(patterns: Sequence[str], columns: InputColumns, model: ModelFolder, *,
                  limit: int | None = None, sample: int = SAMPLE) -> InputLengths:
    """Read the footers of all files and the first `sample` rows; rows that can't be answered have no length.

    Raises `InputError` where no row of the sample has a prompt.
    """
    plan = plan_input(patterns, columns, limit=limit)
    preparer = model.preparer(GenerationDefaults())
    lengths = []
    for row in islice(_rows(plan, columns), sample):
        try:
            lengths.append(len(preparer.prepare(row).token_ids))
        except RowError:
            continue
    if not lengths:
        raise InputError(f"input {', '.join(patterns)}: none of its first {sample} rows has a prompt that the model "
                         "takes; give --rows and --prompt-tokens")
    return InputLengths(rows=_count(plan), sampled=len(lengths), prompt_tokens=sum(lengths) / len(lengths))


def _rows(plan: InputPlan, columns: InputColumns) -> Iterator[InputRow]:
    for task in (task for file in plan.files for task in file.tasks()):
        for item in read_units(read_task(task, columns, plan.kept), task.uri, task.row_group, id_column=columns.id):
            if not isinstance(item, Manifest):
                yield item[0]


def _count(plan: InputPlan) -> int:
    return sum(count_lines(file.uri, sys.maxsize) if file.rows is None else sum(file.rows) for file in plan.files)
