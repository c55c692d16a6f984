"""What a process keeps of its engine's rows for whoever comes after it: answers and records in the journal, attempts.

Owns the rule about rows that kill their process: after `LONELY_FROM` deaths without progress a row runs alone, and one
that died alone is answered `ENGINE_ERROR`; where the user has it tried again, once it has died alone in this run.
Does not know how parts are written (`batchgen_beam.storage`) nor lanes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from batchgen_beam.errors import ErrorCode
from batchgen_beam.records import Answer, ContinuationRecord, EngineRow, Failure, Prompt
from batchgen_beam.settings import JournalSettings
from batchgen_beam.storage.in_flight import Attempt, InFlightFile, dead_attempts
from batchgen_beam.storage.journal import Journal
from batchgen_beam.storage.journal_writer import JournalWriter
from batchgen_beam.storage.store_errors import store_errors
from batchgen_beam.transforms.wording import Wording

__all__ = ["LONELY_FROM", "EngineRecorder", "JournalPlace"]

LOG = logging.getLogger(__name__)

LONELY_FROM = 3
"""So many processes may die with a row that gets nowhere; then it runs alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalPlace:
    """Where a run keeps its journal.

    `known`: paths of the parts that the run's graph has read.  `retry`: failures of these codes are tried again.
    """

    journal: Journal
    run: str
    settings: JournalSettings
    known: frozenset[str] = frozenset()
    retry: frozenset[ErrorCode] = frozenset()


def _generated(row: EngineRow) -> int:
    return 0 if isinstance(row, Prompt) else len(row.generated_ids)


class EngineRecorder:
    """The `Recorder` of a process's driver.  Any thread may look, flush and close."""

    def __init__(self, place: JournalPlace, process: str, wording: Wording, *,
                 clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since the epoch."""
        self.checkpoint_seconds = place.settings.checkpoint_seconds
        self.place = place
        self._wording = wording
        self._clock = clock
        self._writer = JournalWriter(place.journal, place.run, place.settings)
        self._in_flight = InFlightFile(place.journal, place.run, process)
        self._dead: dict[str, Attempt] = {}
        self._convicted: dict[str, Attempt] = {}
        self._inside: dict[str, Attempt] = {}
        self.look()

    # Rows that kill

    def look(self) -> None:
        """Find out which rows processes have died with."""
        now, place = self._clock(), self.place
        dead = dead_attempts(place.journal, now=now)
        tried_again = ErrorCode.ENGINE_ERROR in place.retry
        convicted = dead_attempts(place.journal, now=now, run=place.run) if tried_again else dead
        self._dead, self._convicted = dead, convicted

    def _deaths(self, row: EngineRow, dead: Mapping[str, Attempt]) -> Attempt:
        """Deaths of processes with this row since it last got anywhere."""
        found = dead.get(row.key.text)
        if found is None or _generated(row) > found.length:
            return Attempt(attempts=0, alone=False, length=_generated(row))
        return found

    def alone(self, row: EngineRow) -> bool:
        """Whether the row may only run while no other does."""
        return self._deaths(row, self._dead).attempts >= LONELY_FROM

    def poisoned(self, row: EngineRow) -> Failure | None:
        """The answer of a row whose process died while it ran alone; journalled."""
        deaths = self._deaths(row, self._convicted)
        if not deaths.alone:
            return None
        failure = Failure(key=row.key, code=ErrorCode.ENGINE_ERROR, poison=True, message=(
            f"{deaths.attempts} processes died with this row, the last one while it ran alone; it runs again only "
            f"with --retry-failed={ErrorCode.ENGINE_ERROR}"))
        self.answered([(row, failure)])
        return failure

    # Recorder

    def entering(self, rows: Collection[EngineRow]) -> None:
        """Leave word of who is in the engine; a refusal costs at most the count of one death.

        What others find out about a row that runs among others changes nothing: it counts as it entered.
        """
        by_itself = len(rows) == 1
        told = {} if by_itself else self._inside
        self._inside = {text: told.get(text) or self._attempt(row, by_itself)
                        for text, row in ((row.key.text, row) for row in rows)}
        self._try_to_tell(lambda: self._in_flight.write(self._inside))

    def _attempt(self, row: EngineRow, by_itself: bool) -> Attempt:
        deaths = self._deaths(row, self._dead).attempts
        return Attempt(attempts=deaths, alone=deaths >= LONELY_FROM and by_itself, length=_generated(row))

    def _try_to_tell(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except store_errors() as error:
            LOG.warning("the rows in the engine of this process were not written down: %s", error)

    def answered(self, answers: Sequence[tuple[EngineRow, Answer]]) -> None:
        """Journal them; outcomes without text, which follows from their ids."""
        if answers:
            self._writer.add([self._wording.answer_to(row, answer) if isinstance(answer, Failure) else answer
                              for row, answer in answers])

    def recorded(self, records: Sequence[ContinuationRecord]) -> None:
        """Journal them, and show that this process lives."""
        if records:
            self._writer.add(records)
        self._try_to_tell(self._in_flight.refresh)

    # The end

    def flush(self) -> None:
        """Return once everything so far is stored; a `FatalError` if it can't be."""
        self._writer.flush()

    def close(self) -> None:
        """The engine has no row any more: flush, and take back the word of its rows, also where the flush fails."""
        try:
            self._writer.close()
        finally:
            self._try_to_tell(self._in_flight.remove)
