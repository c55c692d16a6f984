"""Laws of a lane's look at the parts of the journal that appeared since its run began."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from batchgen_beam.errors import ErrorCode
from batchgen_beam.records import Failure
from batchgen_beam.settings import JournalSettings
from batchgen_beam.storage.journal import Journal
from batchgen_beam.transforms.recording import JournalPlace
from batchgen_beam.transforms.replays import LaneReplays
from tests.support.hosting import make_prompt

ROWS = [make_prompt(index) for index in range(8)]
HALF = 1 << 63


def failures(*indices: int) -> list[Failure]:
    """Final answers that take no engine to make."""
    return [Failure(key=ROWS[index].key, code=ErrorCode.NUMERIC_ERROR, message=str(index)) for index in indices]


def replays(journal: Journal, low: int = 0, high: int = 2 * HALF) -> LaneReplays:
    """The look of a lane with these hashes."""
    return LaneReplays(JournalPlace(journal=journal, run="run", settings=JournalSettings()), low, high)


def test_a_lane_finds_its_own_rows_in_all_newer_parts(tmp_path: Path) -> None:
    """Rows are found whichever part they stand in, also in parts that came after the first look; others are not."""
    journal = Journal.of(str(tmp_path), "content")
    journal.write("run", failures(0, 1, 2))
    lower, upper = replays(journal, 0, HALF), replays(journal, HALF, 2 * HALF)
    for lane in (lower, upper):
        lane.refresh()
    journal.write("run", failures(5, 6))
    for lane in (lower, upper):
        lane.refresh()
    found = lower.find(ROWS) | upper.find(ROWS)
    assert found.keys() == {ROWS[index].key.text for index in (0, 1, 2, 5, 6)}
    assert lower.find(ROWS).keys() == {row.key.text for row in ROWS if row.key.text in found and row.key.hash64 < HALF}
    assert found[ROWS[5].key.text].answers == tuple(failures(5))


def test_a_part_that_can_not_be_read_is_told_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What a store does not give now is looked for at the next refresh."""
    journal = Journal.of(str(tmp_path), "content")
    part = journal.write("run", failures(0))
    path = Path(part.path.removeprefix("file://"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    lane = replays(journal)
    with caplog.at_level(logging.WARNING):
        lane.refresh()
    assert part.path in caplog.text
    assert lane.find(ROWS) == {}
    path.write_bytes(whole)
    lane.refresh()
    assert lane.find(ROWS).keys() == {ROWS[0].key.text}
