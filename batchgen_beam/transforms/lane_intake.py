"""What a lane's rows come to before the engine sees them.

Owns the order of the questions: is the row answered in the journal by now, has it come further there, has it killed
every process that ran it.  Does not know Beam's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchgen_beam.records import Answer, ContinuationRecord, EngineRow
from batchgen_beam.storage.settling import Settled
from batchgen_beam.transforms.recording import EngineRecorder
from batchgen_beam.transforms.replays import LaneReplays

__all__ = ["Admission", "LaneIntake"]


@dataclass(frozen=True, slots=True)
class Admission:
    """`answers` need no engine; `rows` do, each from as far as is known."""

    answers: tuple[Answer, ...]
    rows: tuple[EngineRow, ...]


class LaneIntake:
    """The intake of one lane of one process."""

    def __init__(self, recorder: EngineRecorder, replays: LaneReplays) -> None:
        self._recorder = recorder
        self._replays = replays

    def refresh(self) -> None:
        """See what others have written and who has died."""
        self._replays.refresh()
        self._recorder.look()

    def admit(self, rows: Sequence[EngineRow]) -> Admission:
        """The rows, sorted by what they need."""
        found = self._replays.find(rows)
        answers: list[Answer] = []
        going: list[EngineRow] = []
        for row in rows:
            settled = found.get(row.key.text)
            if settled is not None and settled.answers:
                answers += settled.answers
                continue
            furthest = row if settled is None else _furthest(row, settled)
            failure = self._recorder.poisoned(furthest)
            if failure is None:
                going.append(furthest)
            else:
                answers.append(failure)
        return Admission(tuple(answers), tuple(going))


def _furthest(row: EngineRow, settled: Settled) -> EngineRow:
    record = settled.record
    if record is None:
        return row
    here = len(row.generated_ids) if isinstance(row, ContinuationRecord) else 0
    return record if len(record.generated_ids) > here else row
