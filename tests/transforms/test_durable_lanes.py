"""Laws of a lane whose rows outlive its process: journalled answers, records to go on from, rows that kill."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from apache_beam.pvalue import TaggedOutput

from batchgen_beam.errors import EngineError, ErrorCode
from batchgen_beam.records import Answer, ContinuationRecord, EngineRow, Failure, Outcome, Prompt
from batchgen_beam.settings import JournalSettings
from batchgen_beam.storage.in_flight import Attempt
from batchgen_beam.storage.journal import Journal
from batchgen_beam.storage.settling import Entry, settle_entries
from batchgen_beam.text.fake_folder import write_fake_folder
from batchgen_beam.transforms.generate import Round
from batchgen_beam.transforms.host import HostHandle, ProcessHost
from batchgen_beam.transforms.recording import EngineRecorder, JournalPlace
from tests.support.hosting import LaneByHand, host_handle, make_prompt
from tests.support.watched_files import WatchedFiles, watched

pytestmark = pytest.mark.timeout(60)

ROWS = [make_prompt(index, max_tokens=20 + 9 * (index % 7), temperature=index % 2) for index in range(24)]
QUICK = JournalSettings(flush_seconds=0.01, checkpoint_seconds=0.0, compact_seconds=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fake model that never ends by itself."""
    return write_fake_folder(tmp_path_factory.mktemp("model") / "fake", eos_every=0)


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """An empty journal."""
    return Journal.of(str(tmp_path / "out"), "content")


def place(journal: Journal, run: str = "run", **values: object) -> JournalPlace:
    """A run's place in the journal, written at once."""
    return JournalPlace(**{"journal": journal, "run": run, "settings": QUICK, **values})


def durable(folder: Path, journal: Journal, run: str = "run", **values: object) -> HostHandle:
    """A process of a run."""
    return host_handle(folder, journal=place(journal, run, **values))


def finished(lane: LaneByHand) -> tuple[dict[str, Answer], list[ContinuationRecord]]:
    """What the lane gives at its end, by id, and what goes on."""
    answers: dict[str, Answer] = {}
    left = []
    for item in lane.finish():
        if isinstance(item, TaggedOutput):
            left.append(item.value)
        else:
            answers[item[1].key.uuid] = item[1]
    return answers, left


def whole(handle: HostHandle, rows: Iterable[EngineRow]) -> dict[str, Answer]:
    """All rows in one bundle of one lane."""
    lane = LaneByHand.of(handle)
    lane.begin()
    early = {answer.key.uuid: answer for _, answer in lane.process(rows)}
    answers, left = finished(lane)
    assert not left
    return early | answers


def same(answers: dict[str, Answer], others: dict[str, Answer]) -> bool:
    """Whether all outcomes say the same, text included."""
    return answers.keys() == others.keys() and all(
        isinstance(answer, Outcome) and answer.same_answer(others[name]) for name, answer in answers.items())


def entries(journal: Journal) -> list[Entry]:
    """All that a journal holds."""
    return [entry for part in journal.parts() for entry in journal.entries(part).entries]


def generated(host: ProcessHost) -> int:
    """Tokens that the process has sampled; whoever counts has to hold the host, which else ends with its lane."""
    return host.engine().driver.stats().generated_tokens


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, Answer]:
    """All answers of a run without journal."""
    return whole(host_handle(folder), ROWS)


def test_answers_are_stored_when_the_lane_is_done(folder: Path, journal: Journal,
                                                  undisturbed: dict[str, Answer]) -> None:
    """A finished lane's answers are in the journal, without text, and say the same."""
    handle = durable(folder, journal)
    assert same(whole(handle, ROWS), undisturbed)
    stored = {entry.key.uuid: entry for entry in entries(journal) if isinstance(entry, Outcome)}
    assert stored.keys() == undisturbed.keys()
    wording = handle.acquire().wording()
    assert all(entry.text is None for entry in stored.values())
    assert same({name: wording.answer(entry) for name, entry in stored.items()}, undisturbed)


def test_a_bundle_done_again_elsewhere_computes_nothing_that_is_stored(folder: Path, journal: Journal,
                                                                        undisturbed: dict[str, Answer]) -> None:
    """Another process that gets the same rows, as after a worker's death, answers from the journal alone."""
    whole(durable(folder, journal), ROWS)
    second = durable(folder, journal)
    host = second.acquire()
    assert same(whole(second, ROWS), undisturbed)
    assert host.loads == 1
    assert generated(host) == 0


def test_a_finished_lane_leaves_nothing_in_the_process(folder: Path) -> None:
    """Memory does not grow with the rows of lanes that are done: the driver forgets them."""
    handle = host_handle(folder)
    host = handle.acquire()
    for _ in range(2):
        assert len(whole(handle, ROWS)) == len(ROWS)
        assert host.engine().driver._lanes == {}


def test_parts_that_the_graph_has_read_are_not_read_again(folder: Path, journal: Journal) -> None:
    """Entries of the parts that the run's graph knows are not looked at: their rows would not have come here."""
    whole(durable(folder, journal), ROWS)
    known = frozenset(part.path for part in journal.parts())
    second = durable(folder, journal, "next", known=known)
    host = second.acquire()
    whole(second, ROWS[:2])
    assert generated(host) > 0


def test_a_process_that_goes_leaves_its_rows(folder: Path, journal: Journal, undisturbed: dict[str, Answer]) -> None:
    """What ran when a process had to go is gone on with elsewhere: same bits, and only the missing tokens."""
    first = durable(folder, journal)
    lane = LaneByHand.of(first)
    lane.begin()
    lane.process(ROWS)
    host = first.acquire()
    while generated(host) < 300:
        host.engine().driver.take("1/lane", timeout=0.01)
    host.suspend()
    with pytest.raises(EngineError, match="closed"):
        lane.finish()
    assert any(isinstance(entry, ContinuationRecord) for entry in entries(journal))
    second = durable(folder, journal)
    successor = second.acquire()
    assert same(whole(second, ROWS), undisturbed)
    total = sum(answer.completion_tokens for answer in undisturbed.values() if isinstance(answer, Outcome))
    assert generated(host) + generated(successor) == total
    assert successor.engine().driver.stats().resumed_rows > 0
    host.suspend()


def test_records_that_came_by_beam_yield_to_longer_ones(folder: Path, journal: Journal) -> None:
    """A row goes on from the longest record, whether it came with the chunk or stands in the journal."""
    long, short = _records(folder, ROWS[0], 15, 4)
    journal.write("before", [long])
    handle = durable(folder, journal)
    host = handle.acquire()
    assert same(whole(handle, [short]), whole(host_handle(folder), [ROWS[0]]))
    assert generated(host) == 20 - 15
    other = durable(folder, Journal.of(journal.folder, "empty"))
    host = other.acquire()
    whole(other, [long])
    assert generated(host) == 20 - 15


def _records(folder: Path, row: Prompt, *lengths: int) -> list[ContinuationRecord]:
    """Records of a row after so many tokens."""
    (answer,) = whole(host_handle(folder), [row]).values()
    assert isinstance(answer, Outcome)
    made = []
    for length in lengths:
        logprobs = type(answer.logprobs)(chosen=answer.logprobs.chosen[:length])
        made.append(ContinuationRecord(
            key=row.key, prompt_ids=row.token_ids, generated_ids=answer.token_ids[:length], logprobs=logprobs,
            params=row.params, content_print=answer.content_print, numeric_print=answer.numeric_print))
    return made


def _die_with(journal: Journal, run: str, rows: dict[str, Attempt]) -> None:
    """A process that says these rows are in its engine, and dies."""
    code = ("import sys, json, os\n"
            "from batchgen_beam.storage.in_flight import Attempt, InFlightFile\n"
            "from batchgen_beam.storage.journal import Journal\n"
            "rows = {k: Attempt(attempts=a, alone=b, length=n) for k, (a, b, n) in json.loads(sys.argv[3]).items()}\n"
            "InFlightFile(Journal(sys.argv[1]), sys.argv[2], 'dead').write(rows)\n"
            "os.abort()\n")
    told = json.dumps({key: [row.attempts, row.alone, row.length] for key, row in rows.items()})
    dead = subprocess.run([sys.executable, "-c", code, journal.folder, run, told], check=False, timeout=60,
                          capture_output=True)
    assert dead.returncode < 0, dead.stderr


def test_a_row_that_died_alone_is_answered_as_poison(folder: Path, journal: Journal,
                                                     undisturbed: dict[str, Answer]) -> None:
    """Rows of dead processes run again, after three deaths alone; the one that died alone fails by name, durably."""
    suspects = {row.key.text: Attempt(attempts=2, alone=False) for row in ROWS[:4]}
    _die_with(journal, "first", suspects)
    _die_with(journal, "second", {ROWS[3].key.text: Attempt(attempts=3, alone=True)})
    handle = durable(folder, journal)
    answers = whole(handle, ROWS)
    poison = answers.pop(ROWS[3].key.uuid)
    assert isinstance(poison, Failure)
    assert (poison.code, poison.poison, poison.transient) == (ErrorCode.ENGINE_ERROR, True, False)
    assert "4 processes" in poison.message
    assert poison.prompt_head
    assert same(answers, {name: answer for name, answer in undisturbed.items() if name in answers})
    settled = settle_entries(entry for entry in entries(journal) if entry.key == ROWS[3].key)
    assert settled.answers == (poison,)


def test_a_poisonous_row_is_tried_again_once_in_a_run_that_is_told_to(folder: Path, journal: Journal) -> None:
    """--retry-failed=ENGINE_ERROR: deaths of other runs let the row run, alone; dying so in this run is an answer."""
    again = frozenset({ErrorCode.ENGINE_ERROR})
    died = {ROWS[3].key.text: Attempt(attempts=3, alone=True)}
    _die_with(journal, "before", died)
    recorder = EngineRecorder(place(journal, retry=again), "process", host_handle(folder).acquire().wording())
    assert recorder.alone(ROWS[3])
    recorder.close()
    assert isinstance(whole(durable(folder, journal, retry=again), [ROWS[3]])[ROWS[3].key.uuid], Outcome)
    other = Journal.of(journal.folder, "other")
    _die_with(other, "run", died)
    answer = whole(durable(folder, other, retry=again), [ROWS[3]])[ROWS[3].key.uuid]
    assert isinstance(answer, Failure)
    assert answer.poison


def test_only_a_row_without_company_dies_alone(folder: Path, journal: Journal) -> None:
    """A row that others find out about while it runs among many is not said to run alone."""
    recorder = EngineRecorder(place(journal), "process", host_handle(folder).acquire().wording())
    _die_with(journal, "first", {ROWS[0].key.text: Attempt(attempts=2)})
    recorder.look()
    assert recorder.alone(ROWS[0])
    for rows in (ROWS[:2], ROWS[:1]):
        recorder.entering(rows)
        (word,) = _words(journal)
        assert json.loads(word.read_text())["rows"][ROWS[0].key.text] == [3, len(rows) == 1, 0]
    recorder.close()


def test_a_process_ends_well_though_its_store_refuses(folder: Path, tmp_path: Path) -> None:
    """The word of rows that ran can't be taken back from a store that refuses: that is no fault of the run."""
    messages = pytest.importorskip("apache_beam.io.aws.clients.s3.messages")

    def refuse(path: str) -> None:
        raise messages.S3ClientError(f"forbidden: {path}", 403)

    journal = Journal.of(watched(tmp_path / "store"), "content")
    recorder = EngineRecorder(place(journal), "process", host_handle(folder).acquire().wording())
    recorder.entering(ROWS[:2])
    WatchedFiles.before_delete = refuse
    try:
        recorder.close()
    finally:
        WatchedFiles.before_delete = None


def test_the_word_of_rows_is_taken_back_at_a_clean_end(folder: Path, journal: Journal) -> None:
    """While rows run their process says so in a file; a process that ends well leaves none."""
    handle = durable(folder, journal)
    lane = LaneByHand.of(handle)
    lane.begin()
    lane.process(ROWS)
    host = handle.acquire()
    while not list(_words(journal)):
        host.engine().driver.take("1/lane", timeout=0.01)
    finished(lane)
    host.suspend()
    assert not list(_words(journal))


def _words(journal: Journal) -> Iterator[Path]:
    return Path(journal.folder.removeprefix("file://")).glob("run=run/in-flight-*.json")


def test_the_tail_goes_on_in_the_next_round(folder: Path, undisturbed: dict[str, Answer]) -> None:
    """When few rows are left they leave as records, each row once; the next round answers them with the same bits."""
    first = LaneByHand.of(host_handle(folder), Round(number=1, tail=0.5))
    first.begin()
    early = {answer.key.uuid: answer for _, answer in first.process(ROWS)}
    answers, left = finished(first)
    assert 0 < len(left) <= 4
    assert any(record.generated_ids for record in left)
    assert {record.key.uuid for record in left}.isdisjoint(early | answers)
    assert not first.admitted.items
    second = whole(host_handle(folder), left)
    assert same(early | answers | second, undisturbed)


def test_without_tail_nothing_leaves(folder: Path, undisturbed: dict[str, Answer]) -> None:
    """The last round answers every row."""
    lane = LaneByHand.of(host_handle(folder), Round(number=2))
    lane.begin()
    early = {answer.key.uuid: answer for _, answer in lane.process(ROWS)}
    answers, left = finished(lane)
    assert not left
    assert same(early | answers, undisturbed)
