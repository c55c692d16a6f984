"""A run with `--tail-processes`: the same answers, a line that says what was measured, refusals before Beam starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen_beam.pipelines.main import OK, USER_ERROR, main
from batchgen_beam.text.fake_folder import write_fake_folder
from tests.support.jobs import engine_figures, published, questions, run_flags, timeless, write_rows
from tests.support.tails import write_model

pytestmark = pytest.mark.timeout(180)


def test_answers_are_those_of_a_run_without(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever the timing says, the answers and both prints are the same; the timing is told, and what was computed in
    several processes is in the figures of the run's engines."""
    model = write_model("llama", tmp_path / "llama")
    source = write_rows(tmp_path / "a.parquet", questions(3))
    rows = []
    for flags in ((), ("--tail-processes=2",)):
        output = tmp_path / f"out-{len(flags)}"
        assert main(run_flags(source, output, model, *flags)) == OK
        rows.append(timeless(published(output)))
        assert engine_figures(output)["split_rows"] <= bool(flags)
        told = "tail processes: a row's step takes " in capfd.readouterr().err
        assert told is bool(flags)
    assert rows[0] == rows[1]


@pytest.mark.parametrize(("family", "flags", "message"), [
    ("fake", ["--tail-processes=2"], "models of type llama and mixtral are split over processes, this one is "
     "'batchgen_fake'"),
    ("mixtral", ["--tail-processes=2"], "experts are split over processes on the torch kernels alone; give "
     "--kernels=torch"),
    ("mixtral", ["--tail-processes=2", "--kernels=torch", "--weight-memory=1MB"], "leave out --weight-memory"),
    ("fake", ["--tail-processes=0"], "--tail-processes must be at least 1, got 0"),
    ("fake", ["--tail-processes=65"], "--tail-processes must be at most 64, got 65"),
])
def test_what_can_not_be_is_refused_before_anything_runs(family: str, flags: list[str], message: str, tmp_path: Path,
                                                         capfd: pytest.CaptureFixture[str]) -> None:
    """The user's mistake, by name, and no output folder is made."""
    folder = tmp_path / family
    model = write_fake_folder(folder) if family == "fake" else write_model(family, folder)
    source = write_rows(tmp_path / "a.parquet", questions(2))
    assert main(run_flags(source, tmp_path / "out", model, *flags)) == USER_ERROR
    assert message in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
