"""Counts of a run, as a value that can be added up in any order.

Owns which counts there are and that they balance.  Does not know where they are collected, Beam or files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from batchgen_beam.records import Failure, Outcome
from batchgen_beam.storage.units import PlacedAnswer

__all__ = ["RunTotals"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTotals:
    """What was read, answered and published; every field adds up over units.

    `rows` come from the manifests, `results` and `failures` from what was published.  `collapsed` are repeated equal
    answers of one row key, `conflicts` repeated answers that differed; `repeated_ids` are ids that occur more than once
    anywhere in the input, `repeated_id_rows` all rows that have one of them.  `stale_units` are units of earlier runs
    that are not in this one and were set aside.  `skipped_units` and their `skipped_rows` stand as an earlier run
    published them; `reused` are rows of other units whose answers came from the journal, `resumed` rows that went on
    from a continuation there, `journal_problems` parts of the journal that could not be read to their end.
    """

    units: int = 0
    rows: int = 0
    results: int = 0
    failures: Mapping[str, int] = field(default_factory=dict)
    finish_reasons: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    collapsed: int = 0
    conflicts: int = 0
    repeated_ids: int = 0
    repeated_id_rows: int = 0
    stale_units: int = 0
    skipped_units: int = 0
    skipped_rows: int = 0
    reused: int = 0
    resumed: int = 0
    journal_problems: int = 0

    @property
    def failed(self) -> int:
        """Rows without answer, of every code."""
        return sum(self.failures.values())

    @property
    def balanced(self) -> bool:
        """Whether every row that was read is published once."""
        return self.rows == self.results + self.failed

    def as_facts(self) -> dict[str, object]:
        """The counts for a report, codes and reasons sorted."""
        facts: dict[str, object] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            facts[entry.name] = dict(sorted(value.items())) if isinstance(value, Mapping) else value
        return {**facts, "failed": self.failed}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> RunTotals:
        """The inverse of `as_facts`; counts that are not there are zero."""
        return cls(**{entry.name: facts[entry.name] for entry in fields(cls) if entry.name in facts})

    @classmethod
    def sum(cls, parts: Iterable[RunTotals]) -> RunTotals:
        """All parts together; no part at all gives zeros."""
        numbers: Counter[str] = Counter()
        tables: dict[str, Counter[str]] = {"failures": Counter(), "finish_reasons": Counter()}
        for part in parts:
            for entry in fields(part):
                value = getattr(part, entry.name)
                if entry.name in tables:
                    tables[entry.name].update(value)
                else:
                    numbers[entry.name] += value
        return cls(**numbers, **{name: dict(table) for name, table in tables.items()})  # type: ignore[arg-type]

    @classmethod
    def of_unit(cls, rows: int, placed: Iterable[PlacedAnswer]) -> RunTotals:
        """The counts of one output unit of `rows` input rows."""
        placed = list(placed)
        outcomes = [answer for place in placed for answer in place.answers if isinstance(answer, Outcome)]
        failures = [answer for place in placed for answer in place.answers if isinstance(answer, Failure)]
        return cls(
            units=1, rows=rows, results=len(placed) - len(failures),
            failures=dict(Counter(str(failure.code) for failure in failures)),
            finish_reasons=dict(Counter(str(outcome.finish_reason) for outcome in outcomes)),
            prompt_tokens=sum(outcome.prompt_tokens for outcome in outcomes),
            cached_tokens=sum(outcome.cached_tokens for outcome in outcomes),
            completion_tokens=sum(outcome.completion_tokens for outcome in outcomes))
