"""Parts of the journal: what is written is found, bad parts are skipped in words, and little is read."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen_beam.storage.files import exists
from batchgen_beam.storage.journal import Journal, Part, are_among, run_of
from batchgen_beam.storage.journal_rows import PART_SCHEMA, encode_entries
from batchgen_beam.storage.settling import Entry
from tests.storage.entries import failure, key, logprobs_of, outcome, record
from tests.support.watched_files import WatchedFiles, watched


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """An empty journal."""
    return Journal.of(str(tmp_path / "out[1]"), "c0ffee")


def uuids(entries: Sequence[Entry]) -> list[str]:
    """Whose entries they are, sorted."""
    return sorted(entry.key.uuid for entry in entries)


def put(journal: Journal, name: str, data: bytes, run: str = "r") -> Part:
    """A file among the parts."""
    folder = Path(journal.run_folder(run))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    return next(part for part in journal.parts() if part.path.endswith(f"/{name}"))


def problem(journal: Journal, part: Part) -> str:
    """Why a part is skipped; nothing else comes of it."""
    reading = journal.entries(part)
    assert (reading.entries, reading.ignored) == ((), ())
    assert reading.problem is not None
    assert part.path in reading.problem
    assert len(journal.hashes(part).hashes) == 0
    return reading.problem


def test_what_is_written_is_listed_and_read(journal: Journal) -> None:
    """Parts of several runs have names of their own, their runs, sizes and times; the journal travels as a value."""
    assert journal.parts() == []
    written = [journal.write("run-b", [outcome(1), record(2)]), journal.write("run-a", [failure(3)]),
               journal.write("run-a", [outcome(1)], merged=True)]
    parts = pickle.loads(pickle.dumps(journal)).parts()
    assert [part.path for part in parts] == sorted(part.path for part in written)
    assert sorted(part.run for part in parts) == ["run-a", "run-a", "run-b"]
    assert sorted(part.size for part in parts) == sorted(part.size for part in written)
    assert all(part.modified > 1e9 for part in parts)
    assert [run_of(part.path) for part in parts] == [part.run for part in parts]
    assert uuids([entry for part in parts for entry in journal.entries(part).entries]) == [
        "row-1", "row-1", "row-2", "row-3"]


def test_another_content_print_has_another_journal(journal: Journal, tmp_path: Path) -> None:
    """What one print found is not seen under another; other files in the folder are no parts."""
    journal.write("r", [outcome(1)])
    (Path(journal.run_folder("r")) / "in-flight-1.json").write_text("{}")
    (Path(journal.run_folder("r")) / ".x.parquet.tmp").write_text("half")
    assert len(journal.parts()) == 1
    assert Journal.of(str(tmp_path / "out[1]"), "other").parts() == []


def test_a_torn_part_is_skipped_wherever_it_was_cut(journal: Journal) -> None:
    """Every prefix of a part, the empty one too, is a problem in words."""
    data = encode_entries([outcome(index) for index in range(40)])
    for size in sorted({0, 1, 3, 4, 8, 100, len(data) - 9, len(data) - 8, len(data) - 1, *range(0, len(data), 97)}):
        assert "skipped" in problem(journal, put(journal, "cut.parquet", data[:size]))


def test_a_changed_byte_is_found(journal: Journal) -> None:
    """Pages have checksums: no flipped bit in them gives another answer."""
    entries = [outcome(index, 30) for index in range(40)]
    data = bytearray(encode_entries(entries))
    footer = int.from_bytes(data[-8:-4], "little")
    wanted = {repr(entry) for entry in entries}
    for place in range(4, len(data) - 8 - footer, 61):
        data[place] ^= 0x10
        reading = journal.entries(put(journal, "flipped.parquet", bytes(data)))
        data[place] ^= 0x10
        assert reading.problem is not None or {repr(entry) for entry in reading.entries} <= wanted


def test_foreign_later_and_vanished_parts_are_told_apart(journal: Journal) -> None:
    """The message says what the file is: no Parquet, Parquet of somebody else, a later release's, gone."""
    table = pa.table({"a": [1]})
    sink = io.BytesIO()
    pq.write_table(table, sink)
    assert "no part of a journal" in problem(journal, put(journal, "foreign.parquet", sink.getvalue()))
    assert "skipped" in problem(journal, put(journal, "text.parquet", b"hello, this is a text"))
    later = io.BytesIO()
    pq.write_table(PART_SCHEMA.with_metadata({"batchgen_journal": "7"}).empty_table(), later)
    assert "version 7, this release reads 1" in problem(journal, put(journal, "later.parquet", later.getvalue()))
    gone = journal.write("r", [outcome(1)])
    assert journal.delete(gone)
    assert not journal.delete(gone)
    assert "it is gone" in problem(journal, gone)


def test_a_folder_in_place_of_a_part_is_no_part(journal: Journal) -> None:
    """Somebody's folder whose name looks like a part's is not listed."""
    (Path(journal.run_folder("r")) / "folder.parquet").mkdir(parents=True)
    assert journal.parts() == []


def test_a_part_without_entries_is_read_as_such(journal: Journal) -> None:
    """Nothing in it, nothing wrong with it."""
    part = journal.write("r", [])
    assert journal.entries(part).entries == ()
    assert journal.entries(part).problem is None
    assert len(journal.hashes(part).hashes) == 0


def test_ranges_and_hashes_select(journal: Journal) -> None:
    """`[low, high)` and `only` give exactly their rows, at the ends of the range of hashes too."""
    entries = [outcome(index) for index in range(3000)]
    part = journal.write("r", entries)
    hashes = sorted(entry.key.hash64 for entry in entries)
    assert journal.hashes(part).hashes.tolist() == hashes
    low, high = hashes[700], hashes[2200]
    assert journal.hashes(part, low, high).hashes.tolist() == hashes[700:2200]
    assert sorted(entry.key.hash64 for entry in journal.entries(part, low=low, high=high).entries) == hashes[700:2200]
    assert journal.hashes(part, hashes[-1], 1 << 64).hashes.tolist() == hashes[-1:]
    assert journal.hashes(part, hashes[-1] + 1, 1 << 64).hashes.tolist() == []
    only = np.array(sorted(key(index).hash64 for index in (5, 17, 2999, 9999)), np.uint64)
    assert uuids(journal.entries(part, only=only).entries) == ["row-17", "row-2999", "row-5"]
    assert uuids(journal.entries(part, low=key(17).hash64, high=key(17).hash64 + 1, only=only).entries) == ["row-17"]


def test_only_the_row_groups_that_are_needed_are_read(tmp_path: Path) -> None:
    """Reading one row of 16 groups costs about one group; hashes cost about one column; a strange range, the footer."""
    journal = Journal.of(watched(tmp_path / "out"), "c")
    logprobs = [logprobs_of(40, 2, start=-index / 7) for index in range(97)]
    entries = [outcome(index, 40, logprobs=logprobs[index % 97]) for index in range(16 * 1024)]
    [part] = [journal.write("r", entries)]
    file = pq.ParquetFile(str(part.path).removeprefix("watched://"))
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    stored = [sum(group.column(i).total_compressed_size for i in range(group.num_columns)) for group in groups]
    footer = part.size - sum(stored)
    spare = 20_000  # the tail of the file is read before the footer's size is known
    assert len(groups) == 16
    assert footer < max(stored)

    def cost(**chosen: object) -> int:
        before = WatchedFiles.bytes_read
        journal.entries(part, **chosen)  # type: ignore[arg-type]
        return WatchedFiles.bytes_read - before

    assert cost() > sum(stored)
    one = np.array([key(77).hash64], np.uint64)
    hash_column = groups[0].column(0).total_compressed_size
    whole_footer = max(65_536, footer) + spare
    assert cost(only=one) < max(stored) + 2 * hash_column + whole_footer
    assert cost(low=key(77).hash64, high=key(77).hash64 + 1) < max(stored) + 2 * hash_column + whole_footer
    first = min(entry.key.hash64 for entry in entries)
    assert cost(low=0, high=first) <= whole_footer
    before = WatchedFiles.bytes_read
    assert len(journal.hashes(part).hashes) == len(entries)
    assert WatchedFiles.bytes_read - before < 17 * hash_column + whole_footer < part.size / 2


def test_deleting_leaves_other_parts(journal: Journal) -> None:
    """A part is one file."""
    one, two = journal.write("r", [outcome(1)]), journal.write("r", [outcome(2)])
    journal.delete(one)
    assert exists(two.path)
    assert not exists(one.path)


@pytest.mark.parametrize("among", [0, 1, 7, 300])
def test_hashes_are_found_among_others_as_by_comparing_all(among: int) -> None:
    """Whatever stands in both arrays, with repeats, at their ends and outside of them."""
    chance = np.random.default_rng(among)
    ascending = np.unique(chance.integers(0, 400, among).astype(np.uint64))
    hashes = np.array([*chance.integers(0, 450, 200).tolist(), 0, 2**64 - 1], np.uint64)
    assert are_among(hashes, ascending).tolist() == [value in set(ascending.tolist()) for value in hashes.tolist()]
