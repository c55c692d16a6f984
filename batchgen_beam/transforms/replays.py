"""What has been journalled since the run's graph was built: by processes that died, by another run, by this process.

A runner may do a bundle again, or a whole stage; the graph's own look at the journal is then out of date.  Owns an
index of key hashes for each lane, read once per part.  Does not know Beam or the engine.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from batchgen_beam.records import EngineRow
from batchgen_beam.storage.journal import Hashes, Journal, Part, are_among
from batchgen_beam.storage.settling import Entry, Settled, settle_entries
from batchgen_beam.transforms.recording import JournalPlace

__all__ = ["LaneReplays"]

LOG = logging.getLogger(__name__)


class LaneReplays:
    """The newer parts of the journal that concern one lane: key hashes from `low` to before `high`.

    Any thread may refresh and find: lanes of later rounds have all hashes, and share one index.
    """

    def __init__(self, place: JournalPlace, low: int, high: int) -> None:
        self._journal: Journal = place.journal
        self._retry = place.retry
        self._range = low, high
        self._refreshing = threading.Lock()
        self._known = set(place.known)
        self._index: list[tuple[Part, Hashes]] = []
        self._all: Hashes = np.empty(0, np.uint64)

    def refresh(self) -> None:
        """Index the parts that have appeared."""
        with self._refreshing:
            for part in self._journal.parts():
                if part.path not in self._known:
                    self._look_into(part)
            self._all = np.unique(np.concatenate([self._all, *(hashes for _, hashes in self._index)]))

    def _look_into(self, part: Part) -> None:
        """A part that can't be read now may be readable the next time."""
        hashes, problem = self._journal.hashes(part, *self._range)
        if problem is not None:
            LOG.warning("%s", problem)
            return
        self._known.add(part.path)
        if len(hashes):
            self._index.append((part, hashes))

    def find(self, rows: Sequence[EngineRow]) -> dict[str, Settled]:
        """What the journal says about these rows, by row key text; rows that it does not know are left out."""
        asked = np.unique(np.array([row.key.hash64 for row in rows], np.uint64))
        wanted = asked[are_among(asked, self._all)]
        if not len(wanted):
            return {}
        texts = {row.key.text for row in rows}
        found: dict[str, list[Entry]] = defaultdict(list)
        for part, hashes in self._index:
            here = wanted[are_among(wanted, hashes)]
            if len(here):
                for entry in self._read(part, here):
                    found[entry.key.text].append(entry)
        return {text: settle_entries(found[text], retry=self._retry) for text in texts & found.keys()}

    def _read(self, part: Part, hashes: Hashes) -> tuple[Entry, ...]:
        reading = self._journal.entries(part, low=int(hashes[0]), high=int(hashes[-1]) + 1, only=hashes)
        for reason in filter(None, (reading.problem, *reading.ignored)):
            LOG.warning("%s: %s", part.path, reason)
        return reading.entries
