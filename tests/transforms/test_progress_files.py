"""Laws of progress files: sums over processes, and no reader is stopped by a file in the making."""

from __future__ import annotations

import json
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from batchgen_beam.engine.stats import EngineStats
from batchgen_beam.transforms.progress_files import (
    ProgressSample,
    ProgressWriter,
    Readings,
    progress_folder,
    read_samples,
    total,
)
from tests.support.watched_files import failing, watched

WORK = EngineStats(queued=1, active=2, waiting=0, capacity=8, pages_used=3, pages_total=9, forward_calls=4, steps=10)


class _Owner:
    """What a writer reports for."""

    def __init__(self) -> None:
        self.answered = 0

    def sample(self) -> ProgressSample:
        self.answered += 1
        return ProgressSample(process="p", answered=self.answered, failed={"INVALID_ROW": 1})


def test_samples_are_summed_and_the_fill_is_weighted() -> None:
    """Rows and tokens add up, failures by code; the fill is the mean over all steps of all engines."""
    one = ProgressSample(process="a", answered=3, failed={"X": 1}, engine=WORK, fill=1.0, elapsed_seconds=4,
                         engines=1)
    other = ProgressSample(process="b", answered=5, failed={"X": 2, "Y": 1}, engine=replace(WORK, steps=30), fill=0.2,
                           elapsed_seconds=9, engines=1, deterministic=False)
    both = total([one, other])
    assert (both.answered, both.failed, both.failed_rows) == (8, {"X": 3, "Y": 1}, 4)
    assert (both.engine.steps, both.engines) == (40, 2)
    assert both.fill == (10 * 1.0 + 30 * 0.2) / 40
    assert (both.elapsed_seconds, both.engine.capacity, both.engine.pages_total) == (9, 16, 18)
    assert not both.deterministic
    assert total([]).answered == 0


def test_damaged_files_are_counted(tmp_path: Path) -> None:
    """A half written or foreign file is no sample and no error, but it is not passed over in silence."""
    folder = progress_folder(str(tmp_path), "run")
    owner = _Owner()
    writer = ProgressWriter(folder, "good", owner.sample, 60.0)
    assert writer.write()
    writer.close()
    place = tmp_path / "_progress" / "run"
    (place / "half.json").write_text('{"process": "x", "answe')
    (place / "other.json").write_text('{"surprise": 1}')
    readings = read_samples(folder)
    assert ([sample.process for sample in readings.samples], readings.unreadable) == (["p"], 2)
    assert read_samples(str(tmp_path / "nowhere")) == Readings([], 0)


def test_a_store_that_refuses_stops_nobody(tmp_path: Path) -> None:
    """Progress is no result: neither writer nor reader fails with a store, also where its client has errors of its own.

    What could not be read is counted.
    """
    messages = pytest.importorskip("apache_beam.io.aws.clients.s3.messages")

    def refuse(path: str) -> None:
        raise messages.S3ClientError(f"forbidden: {path}", 403)

    folder = progress_folder(watched(tmp_path), "run")
    owner = _Owner()
    writer = ProgressWriter(folder, "p", owner.sample, 60.0)
    assert writer.write()
    with failing(refuse, refuse):
        assert writer.write()
        assert read_samples(folder) == Readings([], 1)
    (sample,) = read_samples(folder).samples
    assert (sample.answered, owner.answered) == (1, 2)
    writer.close()


def test_a_sample_is_read_as_it_was_written() -> None:
    """The engine's statistics are part of the file; a report gets all figures under one another."""
    sample = ProgressSample(process="p", engine=WORK, failed={"INVALID_ROW": 1})
    assert ProgressSample.from_json(sample.to_json()) == sample
    facts = sample.as_facts()
    assert (facts["pages_total"], facts["process"], facts["failed"]) == (9, "p", {"INVALID_ROW": 1})
    assert "engine" not in facts


def test_what_streams_did_is_summed_and_older_samples_lack_it() -> None:
    """Bytes, seconds and files of all processes; a sample without them says zero."""
    sample = ProgressSample(process="p", engine=WORK, streamed_bytes=5, stream_seconds=0.5, stream_files=3,
                            direct_files=2)
    both = total([sample, sample])
    assert (both.streamed_bytes, both.stream_seconds, both.stream_files, both.direct_files) == (10, 1.0, 6, 4)
    assert ProgressSample.from_json(sample.to_json()) == sample
    values = json.loads(sample.to_json())
    for name in ("streamed_bytes", "stream_seconds", "stream_files", "direct_files"):
        del values[name]
    assert ProgressSample.from_json(json.dumps(values).encode()) == ProgressSample(process="p", engine=WORK)


def test_a_writer_that_holds_its_owner_last_may_end_itself(tmp_path: Path) -> None:
    """The owner's finaliser then runs in the writer's own thread, which it must not wait for."""
    inside, go = threading.Event(), threading.Event()

    class Slow(_Owner):
        def sample(self) -> ProgressSample:
            inside.set()
            go.wait(10)
            return super().sample()

    owner = Slow()
    writer = ProgressWriter(str(tmp_path), "p", owner.sample, 0.01)
    ended = weakref.finalize(owner, writer.close)
    assert inside.wait(10)
    del owner
    go.set()
    writer._thread.join(10)
    assert not writer._thread.is_alive()
    assert not ended.alive


def test_a_writer_keeps_nothing_alive(tmp_path: Path) -> None:
    """Once its owner is gone there is nothing to write."""
    owner = _Owner()
    writer = ProgressWriter(str(tmp_path), "p", owner.sample, 60.0)
    del owner
    assert not writer.write()
    writer.close()
