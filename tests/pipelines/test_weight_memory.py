"""A run under `--weight-memory`: the same answers, refusals with the numbers, and a damaged copy that ends by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from batchgen_beam.pipelines.main import FATAL, OK, USER_ERROR, main
from batchgen_beam.text.fake_folder import write_fake_folder
from tests.faults.events import is_part
from tests.faults.job import DURABLE, Job
from tests.faults.kills import Kill, Kind, kill_at
from tests.models.tiny import TINIES, random_model
from tests.support.jobs import FLAGS, engine_figures, published, questions, run_flags, timeless, write_rows

pytestmark = pytest.mark.timeout(180)

LIMIT = "--weight-memory=400KB"
"""Of 1.1 MB of weights."""

SMALL = ("--max-rows=3", "--step-tokens=40", "--attention-batch=2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral with the fake model's tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "mixtral"
    random_model(TINIES["mixtral"], 0).save_pretrained(folder)
    fake = write_fake_folder(folder.parent / "fake")
    for file in fake.iterdir():
        if not (folder / file.name).exists():
            shutil.copy(file, folder)
    return folder


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Callable[..., tuple[int, Path]]:
    """Run the command over ten rows; the exit code and the output folder."""
    source = write_rows(tmp_path / "a.parquet", questions(10))

    def go(name: str, *flags: str) -> tuple[int, Path]:
        output = tmp_path / name
        return main(run_flags(source, output, model, f"--model-cache={tmp_path / 'cache'}", *flags)), output

    return go


def test_streamed_answers_are_those_of_weights_in_memory(run: Callable[..., tuple[int, Path]], tmp_path: Path,
                                                         capfd: pytest.CaptureFixture[str]) -> None:
    """Bit by bit, in batches that the worker chose and in others; the copy is made in the model cache, and later runs
    find it.  What was streamed is told."""
    rows = []
    for name, flags in (("memory", ()), ("streamed", (LIMIT,)), ("again", (LIMIT,)), ("small", (LIMIT, *SMALL))):
        code, output = run(name, *flags)
        assert code == OK
        rows.append(timeless(published(output)))
        copies = list((tmp_path / "cache").glob("packed-*/layer-*.packed"))
        assert len(copies) == (3 if flags else 0)
        figures = engine_figures(output)
        assert (figures["streamed_bytes"] > 600_000) is (figures["stream_seconds"] > 0) is bool(flags)
        assert figures["direct_files"] <= figures["stream_files"] == len(copies)
        assert (" GB streamed, steps waited " in "".join(capfd.readouterr())) is bool(flags)
    assert rows[0] == rows[1] == rows[2] == rows[3]


def test_too_little_memory_is_refused_with_the_numbers(run: Callable[..., tuple[int, Path]],
                                                       capfd: pytest.CaptureFixture[str]) -> None:
    """The user's mistake; the message says what would do."""
    code, _ = run("out", "--weight-memory=100KB")
    assert code == USER_ERROR
    assert "--weight-memory=100,000 is too little: what is always in memory" in capfd.readouterr().err


def test_a_damaged_copy_ends_the_run_by_name_and_the_next_goes_on(run: Callable[..., tuple[int, Path]], tmp_path: Path,
                                                                  capfd: pytest.CaptureFixture[str]) -> None:
    """The file and the part of the layer are named; the same command, run again, makes the file anew and answers."""
    code, whole = run("whole", LIMIT)
    assert code == OK
    copy = next((tmp_path / "cache").glob("packed-*/layer-00001.packed"))
    with copy.open("r+b") as stream:
        stream.seek(-100, 2)
        stream.write(b"\xff" * 4)
    code, _ = run("damaged", LIMIT)
    assert code == FATAL
    assert f"{copy}: area layers.1.experts.7 is damaged (CRC-32 " in capfd.readouterr().err
    code, output = run("damaged", LIMIT)
    assert code == OK
    assert timeless(published(output)) == timeless(published(whole))


def test_a_streaming_run_that_was_killed_goes_on(model: Path, tmp_path: Path) -> None:
    """SIGKILL while it generates: the same command answers every row once, with the bits of an undisturbed run, and
    from the copy that it finds."""
    rows = [{**row, "max_tokens": 60} for row in questions(12)]
    write_rows(tmp_path / "in" / "a.parquet", rows, row_group_size=4)
    (tmp_path / "model").symlink_to(model)
    flags = (*FLAGS, "--kernels=torch", *DURABLE, LIMIT, f"--model-cache={tmp_path / 'cache'}")
    job = Job(folder=tmp_path, rows=len(rows), units=3, flags=flags)
    assert main(job.arguments(tmp_path / "whole")) == OK
    copies = {path: path.stat() for path in (tmp_path / "cache").glob("packed-*/*")}
    assert len(copies) == 3
    kill = Kill(Kind.GENERATING, "part 1", is_part)
    assert kill_at(job, tmp_path / "out", [kill]) == (kill, [])
    assert main(job.arguments(tmp_path / "out")) == OK
    answers = timeless(published(tmp_path / "out"))
    assert sorted(row["uuid"] for row in answers) == sorted(row["uuid"] for row in rows)
    assert answers == timeless(published(tmp_path / "whole"))
    after = {path: path.stat() for path in (tmp_path / "cache").glob("packed-*/*")}
    assert {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in after.items()} == {
        path: (stat.st_ino, stat.st_mtime_ns) for path, stat in copies.items()}
