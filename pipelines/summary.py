"""What a user reads at the end of a run: balanced counts, failures by code, some answers, where the results are.

Owns the wording.  Counts come from the run's report, which the pipeline made from its collections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen_beam.storage.files import join, list_below, read_bytes
from batchgen_beam.storage.published import STALE_FOLDER
from batchgen_beam.storage.units import FAILURES, RESULTS, UNIT_FILES
from batchgen_beam.transforms.progress_files import ProgressSample

__all__ = ["show_summary"]

SHOWN_ANSWERS = 3
SHOWN_CHARS = 160
SHOWN_FAILURES = 10


def show_summary(report: Mapping[str, Any], figures: ProgressSample, *, output: str, stream: TextIO) -> None:
    """Write the summary."""
    counts = report["counts"]
    lines = [*_counts(counts, figures), *_speed(counts, figures), *_samples(output), *_places(report, output)]
    stream.write("\n".join(lines) + "\n")
    stream.flush()


def _counts(counts: Mapping[str, Any], figures: ProgressSample) -> Iterator[str]:
    yield f"{counts['rows']} rows read = {counts['results']} answered + {counts['failed']} failed"
    yield from _earlier(counts, figures)
    for code, number in counts["failures"].items():
        yield f"  {code:<22}{number:>8}"
    reasons = ", ".join(f"{number} {reason}" for reason, number in counts["finish_reasons"].items())
    if reasons:
        yield f"answers ended by: {reasons}"
    if counts["repeated_ids"]:
        yield (f"{counts['repeated_ids']} ids occur more than once ({counts['repeated_id_rows']} rows); "
               "every row is answered; shard, row_group and row tell them apart")
    if counts["conflicts"]:
        yield f"{counts['conflicts']} answers differed from another answer of their row; one was chosen by rule"


def _earlier(counts: Mapping[str, Any], figures: ProgressSample) -> Iterator[str]:
    """What this run did not have to compute."""
    found = counts["skipped_rows"] + counts["reused"]
    if found:
        yield (f"of these {found} by earlier runs: {counts['skipped_rows']} in {counts['skipped_units']} units "
               f"that stay as they are, {counts['reused']} from the journal")
    begun_again = sum(figures.engine.restarts.values())
    if counts["resumed"] > begun_again:
        yield f"{counts['resumed'] - begun_again} rows went on where an earlier run had left them"
    if begun_again:
        yield f"{begun_again} rows began again: an earlier run left them to other kernels, whose bits are others"
    if counts["journal_problems"]:
        yield (f"{counts['journal_problems']} parts of the journal could not be read (see the log); "
               "rows that only they held were computed again")
    if counts["stale_units"]:
        yield f"{counts['stale_units']} units that are not in the input any more were moved to {STALE_FOLDER}/"


def _speed(counts: Mapping[str, Any], figures: ProgressSample) -> Iterator[str]:
    yield f"{counts['prompt_tokens']} prompt tokens in, {counts['completion_tokens']} tokens out"
    engine = figures.engine
    if figures.engines and engine.busy_seconds:
        busy = engine.busy_seconds / engine.span_seconds
        yield (f"engine: {engine.generated_tokens / engine.busy_seconds * figures.engines:.0f} tokens/s while busy "
               f"({100 * busy:.0f} % of the time from its first row to its last step), "
               f"mean batch fill {100 * figures.fill:.0f} % of {engine.capacity} rows, "
               f"{figures.kernels} kernels, model loaded in {figures.load_seconds / figures.engines:.1f} s")
        if engine.split_rows:
            yield (f"engine: {engine.split_rows} last rows went on in several processes, which generated "
                   f"{engine.split_tokens} of their tokens")
        if not figures.deterministic:
            yield "engine: NOT deterministic on this machine, its self-test failed (see the log)"


def _samples(output: str) -> Iterator[str]:
    answers = _head(output, RESULTS, ["uuid", "text"], SHOWN_ANSWERS)
    if answers:
        yield "some answers:"
    for row in answers:
        yield f"  {row['uuid']}: {_clipped(row['text'])}"
    failures = _head(output, FAILURES, ["uuid", "code", "message"], SHOWN_FAILURES)
    if failures:
        yield "some failures:"
    for row in failures:
        yield f"  {row['uuid']}: {row['code']}: {_clipped(row['message'])}"


def _head(output: str, kind: str, columns: list[str], count: int) -> list[dict[str, Any]]:
    """The first rows of the first units' files; what else lies there is not ours to read."""
    rows: list[dict[str, Any]] = []
    for name in list_below(join(output, kind), UNIT_FILES):
        if len(rows) >= count:
            break
        file = pq.ParquetFile(pa.BufferReader(read_bytes(join(output, kind, name))))
        if not set(columns) <= set(file.schema_arrow.names):
            continue
        for batch in file.iter_batches(batch_size=count, columns=columns):
            rows += batch.to_pylist()
            break
    return rows[:count]


def _clipped(text: str | None) -> str:
    flat = " ".join((text or "").split())
    return flat if len(flat) <= SHOWN_CHARS else flat[:SHOWN_CHARS] + "..."


def _places(report: Mapping[str, Any], output: str) -> Iterator[str]:
    yield f"results:  {join(output, RESULTS)}"
    if report["counts"]["failed"]:
        yield f"failures: {join(output, FAILURES)}"
    yield f"report:   {join(output, 'run.json')}"
