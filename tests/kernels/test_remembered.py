"""Laws of what is remembered about a machine: found out once, the first word counts, and no file is no fault."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchgen_beam.kernels.remembered import remembered


def never() -> int:
    """Nothing is to be found out."""
    raise AssertionError("it was known")


def number(place: Path, find_out: Callable[[], int] = never) -> int:
    """A number that a file remembers."""
    def from_json(kept: Any) -> int:
        if kept["number"] < 0:
            raise ValueError("negative")
        return int(kept["number"])

    return remembered(place, find_out, to_json=lambda found: {"number": found}, from_json=from_json)


def test_it_is_found_out_once(tmp_path: Path) -> None:
    """And kept in a folder that is made for it, without a trace of how."""
    place = tmp_path / "new" / "number.json"
    assert number(place, lambda: 3) == 3
    assert number(place) == 3
    assert list(place.parent.iterdir()) == [place]


@pytest.mark.parametrize("broken", [b"", b"torn", b"\xff\xfe", b"null", b"7", b"[]", b"{}", b'{"number": null}',
                                    b'{"number": -1}'])
def test_a_broken_file_is_replaced(tmp_path: Path, broken: bytes) -> None:
    """Whatever is wrong with it."""
    place = tmp_path / "number.json"
    place.write_bytes(broken)
    assert number(place, lambda: 4) == 4
    assert number(place) == 4
    assert list(tmp_path.iterdir()) == [place]


def test_the_word_of_a_process_that_was_first_counts(tmp_path: Path) -> None:
    """Both processes go on with the same."""
    place = tmp_path / "number.json"
    assert number(place, lambda: 6 + 0 * number(place, lambda: 5)) == 5
    assert number(place) == 5


def test_a_folder_that_can_not_be_written_is_no_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was found out holds for this process, and the log says that it is not kept."""
    (tmp_path / "file").touch()
    with caplog.at_level(logging.INFO):
        assert number(tmp_path / "file" / "number.json", lambda: 7) == 7
    assert [message.split(":")[0] for message in caplog.messages] == ["number.json is not remembered"]
