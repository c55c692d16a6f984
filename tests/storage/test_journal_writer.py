"""The writer: nothing that was added is lost, nobody waits for a store, and the number of parts stays small."""

from __future__ import annotations

import errno
import math
import random
import threading
import time
from pathlib import Path

import pytest

from batchgen_beam.errors import FatalError, JournalError
from batchgen_beam.settings import JournalSettings
from batchgen_beam.storage.journal import Journal
from batchgen_beam.storage.journal_rows import encode_entries, estimated_size
from batchgen_beam.storage.journal_writer import (
    AGE_SHARE,
    BUFFER_BYTES,
    PART_BYTES,
    PART_ENTRIES,
    JournalWriter,
    flush_age,
)
from batchgen_beam.storage.settling import Entry
from tests.storage.entries import failure, outcome, record
from tests.support.watched_files import failing, watched

LATE = JournalSettings(flush_seconds=3600.0)
"""No part is written for its age."""


def stored(journal: Journal) -> list[str]:
    """The ids of all that is stored."""
    return sorted(entry.key.uuid for part in journal.parts() for entry in journal.entries(part).entries)


def full_disk(path: str) -> None:
    """No write works, and none is worth another try."""
    raise OSError(errno.ENOSPC, "no space left", path)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """An empty journal in a store that tests can break."""
    return Journal.of(watched(tmp_path / "out"), "c")


def test_a_flush_stores_all_that_was_added_before(journal: Journal) -> None:
    """Nothing is written until somebody asks; then it is one part, and flushing again writes none."""
    writer = JournalWriter(journal, "r", LATE)
    writer.flush()
    writer.add([outcome(1), failure(2)])
    writer.add([record(3)])
    assert journal.parts() == []
    writer.flush()
    writer.flush()
    assert stored(journal) == ["row-1", "row-2", "row-3"]
    assert (writer.parts_written, writer.bytes_written) == (1, journal.parts()[0].size)
    writer.close()
    assert len(journal.parts()) == 1


def test_closing_stores_the_rest_and_takes_nothing_more(journal: Journal) -> None:
    """The thread ends, and what comes later is refused loudly."""
    before = threading.active_count()
    writer = JournalWriter(journal, "r", LATE)
    writer.add([outcome(1)])
    writer.close()
    writer.close()
    assert stored(journal) == ["row-1"]
    assert threading.active_count() == before
    with pytest.raises(JournalError, match="takes no more answers"):
        writer.add([outcome(2)])


def test_a_part_is_written_when_the_buffer_has_enough(journal: Journal) -> None:
    """At 4,096 entries without being asked; what is over waits on."""
    writer = JournalWriter(journal, "r", LATE)
    written = threading.Event()
    with failing(lambda path: written.set()):
        writer.add([failure(index) for index in range(PART_ENTRIES + 5)])
        assert written.wait(60)
    writer.close()
    sizes = sorted(len(journal.hashes(part).hashes) for part in journal.parts())
    assert sizes == [5, PART_ENTRIES]


def test_a_part_is_written_when_the_entries_are_big_enough(journal: Journal) -> None:
    """At 8 MiB before compression, in parts that end with the entry that reaches it."""
    big = [failure(index, message="m" * 1_000_000) for index in range(20)]
    writer = JournalWriter(journal, "r", LATE)
    writer.add(big)
    writer.close()
    each = math.ceil(PART_BYTES / estimated_size(big[0]))
    assert sorted(len(journal.hashes(part).hashes) for part in journal.parts()) == sorted([each, each, 20 - 2 * each])


def test_a_part_is_written_when_its_oldest_entry_is_old_enough(journal: Journal) -> None:
    """Asked by nobody."""
    written = threading.Event()
    with failing(lambda path: written.set()):
        writer = JournalWriter(journal, "r", JournalSettings(flush_seconds=0.01))
        writer.add([outcome(1)])
        assert written.wait(60)
    writer.close()
    assert stored(journal) == ["row-1"]


def test_eight_threads_and_failing_writes_lose_nothing(journal: Journal) -> None:
    """Two writes of three fail, some for good; every entry that was added is stored exactly once."""
    chance, lock = random.Random(5), threading.Lock()

    def mostly_full(path: str) -> None:
        with lock:
            if chance.random() < 2 / 3:
                full_disk(path)

    def work(writer: JournalWriter, name: int) -> None:
        for index in range(300):
            writer.add([failure(1000 * name + index), outcome(1000 * name + 500 + index)])
            if index % 60 == name:
                flush_somehow(writer)

    writer = JournalWriter(journal, "r", JournalSettings(flush_seconds=0.01))
    with failing(mostly_full):
        threads = [threading.Thread(target=work, args=(writer, name)) for name in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    writer.close()
    wanted = [f"row-{1000 * name + offset + index}" for name in range(8) for offset in (0, 500) for index in range(300)]
    assert stored(journal) == sorted(wanted)
    assert sum(part.size for part in journal.parts()) == writer.bytes_written
    assert len(journal.parts()) == writer.parts_written


def flush_somehow(writer: JournalWriter) -> None:
    """Ask until it works."""
    while True:
        try:
            return writer.flush()
        except JournalError:
            continue


def test_a_flush_that_fails_says_why_and_the_entries_wait_on(journal: Journal) -> None:
    """The error names the journal, the cause and the remedy, and is fatal; once there is space, all is stored."""
    writer = JournalWriter(journal, "r", LATE)
    writer.add([outcome(1)])
    with failing(full_disk):
        for _ in range(2):
            with pytest.raises(FatalError, match=r"journal .*_journal/c: answers can't be written \(.*no space left"
                               ) as caught:
                writer.flush()
            assert isinstance(caught.value.__cause__, OSError)
    writer.add([outcome(2)])
    writer.close()
    assert stored(journal) == ["row-1", "row-2"]


def test_a_flush_outlives_the_failure_of_a_write_that_had_begun(journal: Journal) -> None:
    """Who asks while a write hangs that will fail has everything written at once, not when its age or a retry comes."""
    writes = iter((True, False))
    entered, go_on = threading.Event(), threading.Event()

    def first_hangs_and_fails(path: str) -> None:
        if next(writes, False):
            entered.set()
            assert go_on.wait(60)
            full_disk(path)

    writer = JournalWriter(journal, "r", LATE, clock=lambda: 0.0)
    with failing(first_hangs_and_fails):
        writer.add([failure(index) for index in range(PART_ENTRIES)])
        assert entered.wait(60)
        writer.add([outcome(PART_ENTRIES)])
        asking = threading.Thread(target=writer.flush, daemon=True)
        asking.start()
        while writer._asked <= PART_ENTRIES:
            time.sleep(0.001)
        go_on.set()
        asking.join(60)
        assert not asking.is_alive()
    assert len(stored(journal)) == PART_ENTRIES + 1
    writer.close()


def test_closing_ends_the_thread_though_nothing_can_be_written(journal: Journal) -> None:
    """The error is raised, and no thread is left behind."""
    before = threading.active_count()
    writer = JournalWriter(journal, "r", LATE)
    writer.add([outcome(1)])
    with failing(full_disk), pytest.raises(JournalError):
        writer.close()
    assert threading.active_count() == before
    with pytest.raises(JournalError, match="can't be written"):
        writer.flush()


def test_the_buffer_is_bounded(journal: Journal) -> None:
    """Where nothing can be written, adding becomes a fatal error at the bound; what was taken over is not lost."""
    entry = failure(0)
    bound = 50 * estimated_size(entry)
    writer = JournalWriter(journal, "r", LATE, buffer_bytes=bound)
    with failing(full_disk):
        for index in range(50):
            writer.add([failure(index)])
        with pytest.raises(JournalError, match="wait to be written"):
            writer.add([failure(50)])
    writer.close()
    assert len(stored(journal)) == 51


def test_adding_does_not_wait_for_the_store(journal: Journal) -> None:
    """While a write hangs, others can add; it is all stored once the write gets on."""
    entered, go_on = threading.Event(), threading.Event()

    def hang(path: str) -> None:
        entered.set()
        assert go_on.wait(60)

    writer = JournalWriter(journal, "r", JournalSettings(flush_seconds=0.0))
    with failing(hang):
        writer.add([outcome(1)])
        assert entered.wait(60)
        for index in range(2, 200):
            writer.add([outcome(index)])
        go_on.set()
        writer.close()
    assert len(stored(journal)) == 199


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_died_keeps_nobody_waiting(journal: Journal) -> None:
    """An error that is none of a store's ends the thread; whoever flushes or adds is told."""
    def broken(path: str) -> None:
        raise AssertionError("a fault of ours")

    writer = JournalWriter(journal, "r", LATE)
    writer.add([outcome(1)])
    with failing(broken), pytest.raises(JournalError):
        writer.flush()
    with pytest.raises(JournalError):
        writer.add([outcome(2)])
    with pytest.raises(JournalError):
        writer.close()


def parts_by_age(flush_seconds: float, life: float) -> int:
    """How many parts a writer leaves that is never idle and is never asked."""
    now, parts = 0.0, 0
    while now < life:
        now += flush_age(flush_seconds, now)
        parts += 1
    return parts


def test_ten_million_rows_leave_a_bounded_number_of_parts() -> None:
    """8 processes, 10 days, 500 tokens a row: under 20,000 parts, and 256 MiB of buffer and 8 MiB of part a process."""
    rows, processes, days = 10_000_000, 8, 10
    size = estimated_size(outcome(0, 500))
    by_size = max(rows / PART_ENTRIES, rows * size / PART_BYTES)
    by_age = processes * parts_by_age(30.0, days * 86_400)
    assert by_size < 6000
    assert by_age < 8 * 1400
    assert by_size + by_age < 20_000
    assert BUFFER_BYTES + PART_BYTES < 300 << 20


def test_the_age_of_parts_grows_with_the_writers_life() -> None:
    """At first what the user chose, then a half percent: so many parts for each e-fold, not for each hour."""
    assert flush_age(30.0, 0.0) == flush_age(30.0, 6000.0) == 30.0
    assert flush_age(30.0, 12_000.0) == 60.0
    hour, year = parts_by_age(30.0, 3600.0), parts_by_age(30.0, 365 * 86_400)
    assert hour == 120
    assert year < hour + 100 + math.log(365 * 86_400 / 6000) / AGE_SHARE


def test_a_part_has_the_bytes_that_the_arithmetic_says() -> None:
    """4,096 short answers or 8 MiB of long ones are stored in less than they take in memory."""
    entries: list[Entry] = [outcome(index, 500) for index in range(500)]
    assert len(encode_entries(entries)) < sum(map(estimated_size, entries))


