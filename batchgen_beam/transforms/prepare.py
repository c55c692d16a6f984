"""Input rows to prompts, or to failures.

Owns the step and its two outputs.  Does not know how templates and tokenizers work (`batchgen_beam.text`), nor the
engine: a worker that only prepares loads no weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import apache_beam as beam
from apache_beam.pvalue import TaggedOutput

from batchgen_beam.records import Answer, Failure, InputRow, Prompt
from batchgen_beam.text.prepare import prompt_head
from batchgen_beam.transforms.host import HostHandle
from batchgen_beam.transforms.metrics import RowMetrics
from batchgen_beam.transforms.row_boundary import at_row_boundary

__all__ = ["Prepare", "Prepared"]

PROMPTS = "prompts"
FAILED = "failed"


class PrepareRow(beam.DoFn):
    """One row at a time; a bad row becomes a failure and never touches another."""

    def __init__(self, handle: HostHandle) -> None:
        self._handle = handle
        self._rows = RowMetrics()

    def setup(self) -> None:
        """The process's tokenizer and template."""
        self._host = self._handle.acquire()
        self._preparer = self._host.preparer()

    def process(self, row: InputRow) -> Iterator[Prompt | TaggedOutput]:
        """The prompt on the main output, or (row key text, Failure) on `failed`."""
        prepared = at_row_boundary(row.key, lambda: self._preparer.prepare(row), lambda: prompt_head(row))
        if isinstance(prepared, Failure):
            self._rows.count(prepared)
            self._host.count(prepared)
            yield TaggedOutput(FAILED, (row.key.text, prepared))
        else:
            yield prepared


class Prepared(NamedTuple):
    """What Prepare gives: prompts, and answers of rows that failed, by row key text."""

    prompts: beam.PCollection
    failures: beam.PCollection


class Prepare(beam.PTransform):
    """InputRow -> Prompt | (row key text, Failure)."""

    def __init__(self, handle: HostHandle) -> None:
        super().__init__()
        self._handle = handle

    def expand(self, rows: beam.PCollection) -> Prepared:
        """See the class."""
        step = beam.ParDo(PrepareRow(self._handle)).with_output_types(Prompt, failed=tuple[str, Answer])
        outputs = rows | "PrepareRow" >> step.with_outputs(FAILED, main=PROMPTS)
        return Prepared(prompts=outputs[PROMPTS], failures=outputs[FAILED])
