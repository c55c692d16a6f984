"""Laws of runs whose model is not simply a path: on a store, in the workers' image, known to the launcher by facts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from batchgen_beam.pipelines.main import OK, USER_ERROR, main
from batchgen_beam.text.fake_folder import write_fake_folder
from tests.support.jobs import published, questions, run_flags, timeless, write_rows

pytestmark = pytest.mark.timeout(120)

REMOTE = ("--runner=PortableRunner", "--job_endpoint=localhost:1")
PROCESSES = ("--direct_num_workers=2", "--direct_running_mode=multi_processing")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The fake model."""
    return write_fake_folder(tmp_path / "fake")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A few questions."""
    return write_rows(tmp_path / "a.parquet", questions(12))


@pytest.fixture
def facts(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Path]:
    """The model's facts, as its owner writes them."""
    assert main(["inspect", str(model), f"--write-facts={tmp_path / 'facts'}"]) == OK
    capsys.readouterr()
    return tmp_path / "facts"


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What the command said last."""
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_a_model_on_a_store_gives_what_the_folder_gives(model: Path, rows: Path, tmp_path: Path) -> None:
    """Same answers under the same content print, in the same output folder; the copy is in --model-cache."""
    for file in model.iterdir():
        fsspec.filesystem("memory").pipe(f"/elsewhere/fake/{file.name}", file.read_bytes())
    assert main(run_flags(rows, tmp_path / "local", model)) == OK
    flags = (f"--model-cache={tmp_path / 'cache'}", "--model=memory://elsewhere/fake")
    assert main(run_flags(rows, tmp_path / "store", model, *flags)) == OK
    assert timeless(published(tmp_path / "store")) == timeless(published(tmp_path / "local"))
    assert main(run_flags(rows, tmp_path / "local", model, *flags)) == OK
    assert [path.name[:6] for path in (tmp_path / "cache").iterdir() if path.is_dir()] == ["model-"]


def test_worker_processes_copy_the_model_themselves(model: Path, rows: Path, tmp_path: Path) -> None:
    """They are told the URI, not the launcher's copy."""
    flags = (f"--model=local://{model}", f"--model-cache={tmp_path / 'cache'}", *PROCESSES)
    assert main(run_flags(rows, tmp_path / "out", model, *flags)) == OK
    assert len(published(tmp_path / "out")) == 12


def test_a_model_in_the_workers_image_is_a_path_there(model: Path, rows: Path, tmp_path: Path) -> None:
    """A launcher that has it too, as one that runs in that image, needs nothing else."""
    assert main(run_flags(rows, tmp_path / "out", model, f"--model=worker:{model}")) == OK
    assert {row["model"] for row in published(tmp_path / "out")} == {"fake"}


def test_a_launcher_without_the_model_asks_for_its_facts(
        model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything runs, with the command that makes them."""
    told = run_flags(f"file://{rows}", f"file://{tmp_path}/out", model, "--model=worker:/opt/absent", *REMOTE)
    assert main(told) == USER_ERROR
    assert re.search(r"--model=worker:/opt/absent is in the workers' image, and this machine has no /opt/absent: .*"
                     r"`batchgen-beam inspect /opt/absent --write-facts FOLDER`.*--model-facts=FOLDER",
                     last_line(capsys))
    assert not (tmp_path / "out").exists()


def test_facts_stand_for_the_model(model: Path, facts: Path, rows: Path, tmp_path: Path) -> None:
    """The run is the same, under the same content print; the facts hold no weights."""
    assert main(run_flags(rows, tmp_path / "out", model)) == OK
    before = timeless(published(tmp_path / "out"))
    assert main(run_flags(rows, tmp_path / "out", model, f"--model-facts={facts}", f"--model=worker:{model}")) == OK
    assert timeless(published(tmp_path / "out")) == before
    assert {path.name for path in facts.iterdir()} == {path.name for path in model.iterdir()} | {"model-facts.json"}


def test_workers_that_have_another_model_are_refused(
        model: Path, facts: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The launcher's facts are held against the workers' own files, wherever those lie, and what differs is named."""
    write_fake_folder(model, eos_every=7)
    for flags in ((), PROCESSES):
        told = run_flags(rows, tmp_path / "out", model, f"--model-facts={facts}", *flags)
        assert main(told) == USER_ERROR
        assert re.search(r"model \S+ on \S+ is not the one that the launcher read \(model_config: \w+ -> \w+\)",
                         last_line(capsys))
    assert published(tmp_path / "out") == []


def test_a_worker_without_the_model_is_named(
        model: Path, facts: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says so when it starts, as a mistake of the user's: which path, on which machine."""
    told = run_flags(rows, tmp_path / "out", model, f"--model-facts={facts}", "--model=worker:/opt/absent", *PROCESSES)
    assert main(told) == USER_ERROR
    assert re.search(r"model 'worker:/opt/absent': there is neither a folder nor a file of that name on \S+; it has to "
                     r"be there on every worker", last_line(capsys))


@pytest.mark.parametrize(("content", "message"), [
    (None, r"--model-facts=\S+ is no folder with model-facts.json; `batchgen-beam inspect MODEL --write-facts FOLDER`"),
    ('{"version": 99, "weights": "x"}', r"--model-facts=\S+ was made by another version"),
    ('{"version": 1}', r"--model-facts=\S+ was made by another version"),
])
def test_what_are_no_facts_is_refused(content: str | None, message: str, model: Path, rows: Path, tmp_path: Path,
                                      capsys: pytest.CaptureFixture[str]) -> None:
    """By the flag's name."""
    if content is not None:
        (model / "model-facts.json").write_text(content)
    assert main(run_flags(rows, tmp_path / "out", model, f"--model-facts={model}")) == USER_ERROR
    assert re.search(message, last_line(capsys))


def test_facts_are_written_into_a_new_folder_only(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder with files is left as it is: it may be the model."""
    before = sorted(path.name for path in model.iterdir())
    assert main(["inspect", str(model), f"--write-facts={model}"]) == USER_ERROR
    assert "is not empty; name a new folder" in last_line(capsys)
    assert main(["inspect", str(model), f"--write-facts={model / 'config.json'}"]) == USER_ERROR
    assert "config.json can't be written" in last_line(capsys)
    assert sorted(path.name for path in model.iterdir()) == before


def test_a_remote_runner_takes_what_its_workers_can_reach(
        model: Path, facts: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path of the launcher is refused even with facts; a URI, file:/// and worker:/ pass this check."""
    told = run_flags(f"file://{rows}", f"file://{tmp_path}/out", model, f"--model-facts={facts}",
                     "--runner=DataflowRunner")
    assert main(told) == USER_ERROR
    assert re.search(rf"--model={re.escape(str(model))} is a path of this one", last_line(capsys))
    for there in (f"file://{model}", "worker:/opt/model", "gs://bucket/model"):
        assert main([*told, f"--model={there}"]) == USER_ERROR
        assert re.search(r"--runner=DataflowRunner: .*project", last_line(capsys))


def test_input_and_output_of_a_remote_runner_are_where_its_workers_can_reach(
        model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch) -> None:
    """A path of the launcher is refused with the one to write: results would lie on whichever machine made them."""
    monkeypatch.chdir(tmp_path)
    for source, output, flag in ((rows, f"file://{tmp_path}/out", "--input"), (f"file://{rows}", "out", "--output")):
        assert main(run_flags(source, output, model, f"--model=file://{model}", *REMOTE)) == USER_ERROR
        assert re.search(rf"{flag}=.* is a path of this one; .*or write {flag}=file:///", last_line(capsys))
    assert not (tmp_path / "out").exists()
