"""Laws of a disk's rate: there is one also where a file system has no direct reading, and none of half a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen_beam.errors import OptionError
from batchgen_beam.weights import disk_rate as module
from batchgen_beam.weights.disk_rate import PIECE_BYTES, disk_rate, read_seconds
from batchgen_beam.weights.packed_format import DamagedCopy


def test_a_disk_that_can_not_be_timed_is_named(tmp_path: Path) -> None:
    """The message has the folder and the flag."""
    place = tmp_path / "file"
    place.touch()
    with pytest.raises(OptionError, match=f"--model-cache: the disk under {place} can't be timed"):
        disk_rate(place)


def test_a_disk_without_direct_reading_is_timed_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where opening worked and reading is what is refused, as it is here by pieces that are no pages."""
    monkeypatch.setattr(module, "PIECE_BYTES", 1000)
    monkeypatch.setattr(module, "SAMPLE_BYTES", 10_000)
    assert disk_rate(tmp_path) > 0
    assert not list(tmp_path.iterdir())


def test_a_file_that_ends_early_gives_no_rate(tmp_path: Path) -> None:
    """A disk would else be as fast as its file is short."""
    place = tmp_path / "half"
    place.write_bytes(bytes(PIECE_BYTES))
    with pytest.raises(DamagedCopy, match="half ends at byte 8388608"):
        read_seconds(place, 2 * PIECE_BYTES)
