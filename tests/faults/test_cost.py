"""The law of the price of a kill: the next run samples what no record holds, and prefills what is unfinished."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from batchgen_beam.pipelines.main import OK
from batchgen_beam.records import ContinuationRecord, Outcome
from batchgen_beam.storage.settling import settle_entries
from tests.faults.conftest import Reference
from tests.faults.events import is_part
from tests.faults.job import run_figures
from tests.faults.kills import Kill, Kind, journal_of, kill_at, run_names

pytestmark = pytest.mark.timeout(600)

OFTEN = ("--flush-interval=0.15", "--checkpoint-interval=0.15", "--progress-interval=0.1")
"""So that some row under way has a record about when half of the tokens are there."""


UNCUT = ("--prefill-chunk=0", "--step-tokens=16384")
"""All contexts fit into one pass.  Where a chunk leaves one token, a decode step takes it, and no count of prefilled
tokens holds it: by chance, where chunks are cut."""


@dataclass(frozen=True, kw_only=True)
class Durable:
    """What the journal of a killed run holds: generated tokens of answered rows and of rows under way.

    `contexts`: what of the rows under way had gone through the model.
    """

    answered: int
    answered_rows: int
    answered_prompts: int
    under_way: int
    contexts: int
    records: Mapping[str, ContinuationRecord]


def durable(output: Path) -> Durable:
    """By the same rule of precedence as the next run's."""
    journal = journal_of(output)
    assert journal is not None
    by_row: dict[str, list[Any]] = {}
    for part in journal.parts():
        for entry in journal.entries(part).entries:
            by_row.setdefault(entry.key.uuid, []).append(entry)
    settled = {uuid: settle_entries(entries) for uuid, entries in by_row.items()}
    answers = [answer for row in settled.values() for answer in row.answers if isinstance(answer, Outcome)]
    records = {uuid: row.record for uuid, row in settled.items() if row.record is not None and not row.answers}
    return Durable(
        answered=sum(answer.completion_tokens for answer in answers), answered_rows=len(answers),
        answered_prompts=sum(answer.prompt_tokens for answer in answers),
        under_way=sum(len(record.generated_ids) for record in records.values()),
        contexts=sum(len(record.prompt_ids) + len(record.generated_ids) - 1 for record in records.values()),
        records=records)


def test_what_a_kill_costs(reference: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case 52, B14: killed at about half of its tokens, a job samples no token twice that a record holds.

    Journalled rows take no forward token; an unfinished row is prefilled once, its prompt and what it had generated.
    """
    output = tmp_path / "out"
    counts = json.loads((reference.output / "run.json").read_text())["counts"]
    whole, prompts = counts["completion_tokens"], counts["prompt_tokens"]

    def half(path: str) -> bool:
        """Not where all that the journal holds is answers: a kill costs nothing of rows that are still to begin."""
        return is_part(path) and sampled(output) >= whole / 2 and bool(durable(output).records)

    job = replace(reference.job, flags=(*reference.job.flags, *OFTEN))
    kill, _ = kill_at(job, output, [Kill(Kind.GENERATING, "half of the tokens", half)])
    assert kill is not None
    kept = durable(output)
    first = max(sampled(output), kept.answered + kept.under_way)  # its last report is a moment old
    assert 0 < kept.answered_rows < reference.job.rows
    assert kept.records
    assert replace(reference.job, flags=(*reference.job.flags, *UNCUT)).run(output).code == OK
    assert reference.faults(output) == []
    (second,) = run_figures(output, run_names(output)[-1:]).values()
    lost = first - kept.answered - kept.under_way
    fresh = second["prefilled_tokens"] - second["resumed_tokens"]
    with capsys.disabled():
        sys.stdout.write(
            f"\nundisturbed {whole} tokens; killed after {first} at least, of which {kept.answered} in answers, "
            f"{kept.under_way} in records, {lost} lost; the second run: {second['generated_tokens']} sampled, "
            f"{fresh} prefilled for the first time, "
            f"{second['resumed_tokens']} prefilled again\n")
    assert first + second["generated_tokens"] <= whole * 1.02 + lost
    assert second["resumed_rows"] == len(kept.records)
    assert second["resumed_tokens"] <= kept.contexts
    begun = sum(len(record.prompt_ids) for record in kept.records.values())
    unknown = prompts - kept.answered_prompts - begun
    assert fresh == unknown + len(kept.records), "the last token of a record has been through no model yet"


def sampled(output: Path) -> int:
    """Tokens that the first run has sampled, by its last report."""
    return sum(run["generated_tokens"] for run in run_figures(output, run_names(output)[:1]).values())
