"""Laws of the watch: what happens in a folder is told once, in order, wherever it happens."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from batchgen_beam.storage.files import remove, write_atomically
from tests.faults.events import Change, Event, FolderWatch, is_merged, is_part, is_report, is_temporary, is_unit


def test_writes_are_told_in_order_in_folders_that_did_not_exist(tmp_path: Path) -> None:
    """A temporary name, its rename and a deletion, three folders down; what was there before is not told."""
    write_atomically(str(tmp_path / "old" / "file"), b"x")
    with FolderWatch(tmp_path) as watch:
        write_atomically(str(tmp_path / "a" / "b" / "c" / "first"), b"x")
        write_atomically(str(tmp_path / "old" / "second"), b"x")
        remove(str(tmp_path / "old" / "file"))
        found = list(watch.events(0.05))
    seen = [event for event in found if not event.path.endswith(".tmp")]
    assert seen == [Event(Change.APPEARED, "a/b/c/first"), Event(Change.APPEARED, "old/second"),
                    Event(Change.DELETED, "old/file")]
    written = [event.change for event in found if event.path.startswith("old/.second")]
    assert written == [Change.CREATED, Change.WRITTEN, Change.VANISHED]


def test_no_file_is_told_twice(tmp_path: Path) -> None:
    """Files in folders that appear while others are read: each appears once."""
    names = [f"folder-{index % 7}/{index % 5}/file-{index}" for index in range(200)]
    with FolderWatch(tmp_path) as watch:
        for name in names:
            write_atomically(str(tmp_path / name), b"x")
        found = Counter(event.path for event in watch.events(0.1) if event.appeared())
    assert found == Counter(names)


@pytest.mark.parametrize(("path", "kinds"), [
    ("_journal/0a/run=r-1/5f0c.parquet", [is_part]),
    ("_journal/0a/run=r-1/merged-5f0c.parquet", [is_merged]),
    ("_journal/0a/run=r-1/.5f0c.parquet.77aa.tmp", [is_temporary]),
    ("_journal/0a/run=r-1/in-flight-p.json", []),
    ("results/in/a.parquet/rg-000000-s-0000.parquet", [is_unit]),
    ("results/in/a.parquet/.rg-000000-s-0000.parquet.77aa.tmp", [is_temporary]),
    ("_runs/r-1.json", [is_report]),
    ("_runs/r-1.engine.json", []),
    ("_SUCCESS", []),
])
def test_files_are_told_apart_by_name(path: str, kinds: list[object]) -> None:
    """Each path of an output folder is one kind of file, or none that matters."""
    assert [kind for kind in (is_part, is_merged, is_unit, is_report, is_temporary) if kind(path)] == kinds
