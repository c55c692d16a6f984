"""Laws of progress files: sums over processes, and no reader is stopped by a file in the making."""

from __future__ import annotations

from pathlib import Path

from batchgen_beam.transforms.progress_files import ProgressSample, ProgressWriter, progress_folder, read_samples, total


class _Owner:
    """What a writer reports for."""

    def __init__(self) -> None:
        self.answered = 0

    def sample(self) -> ProgressSample:
        self.answered += 1
        return ProgressSample(process="p", answered=self.answered, failed={"INVALID_ROW": 1})


def test_samples_are_summed_and_the_fill_is_weighted() -> None:
    """Rows and tokens add up, failures by code; the fill is the mean over all steps of all engines."""
    one = ProgressSample(process="a", answered=3, failed={"X": 1}, steps=10, fill=1.0, elapsed_seconds=4, engines=1)
    other = ProgressSample(process="b", answered=5, failed={"X": 2, "Y": 1}, steps=30, fill=0.2, elapsed_seconds=9,
                           engines=1, deterministic=False)
    both = total([one, other])
    assert (both.answered, both.failed, both.failed_rows, both.steps, both.engines) == (8, {"X": 3, "Y": 1}, 4, 40, 2)
    assert both.fill == (10 * 1.0 + 30 * 0.2) / 40
    assert both.elapsed_seconds == 9
    assert not both.deterministic
    assert total([]).answered == 0


def test_damaged_files_are_skipped(tmp_path: Path) -> None:
    """A half written or foreign file is no sample and no error."""
    folder = progress_folder(str(tmp_path), "run")
    owner = _Owner()
    writer = ProgressWriter(folder, "good", owner.sample, 60.0)
    assert writer.write()
    writer.close()
    place = tmp_path / "_progress" / "run"
    (place / "half.json").write_text('{"process": "x", "answe')
    (place / "other.json").write_text('{"surprise": 1}')
    assert [sample.process for sample in read_samples(folder)] == ["p"]
    assert read_samples(str(tmp_path / "nowhere")) == []


def test_a_writer_keeps_nothing_alive(tmp_path: Path) -> None:
    """Once its owner is gone there is nothing to write."""
    owner = _Owner()
    writer = ProgressWriter(str(tmp_path), "p", owner.sample, 60.0)
    del owner
    assert not writer.write()
    writer.close()
