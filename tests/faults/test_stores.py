"""Laws of failing stores: writes that fail, objects that vanish, a disk that is full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from batchgen_beam.pipelines.main import FATAL, OK, main
from batchgen_beam.text.fake_folder import write_fake_folder
from tests.faults.compare import differences, published_rows
from tests.support.jobs import published, questions, run_flags, timeless, write_rows
from tests.support.object_store import Bucket, StoreFaults, bucket
from tests.support.stored import parquet_bytes, stored_rows

pytestmark = pytest.mark.timeout(300)

ROWS = [{**row, "max_tokens": 30 + index % 9} for index, row in enumerate(questions(60))]
SOON = ("--flush-interval=0", "--checkpoint-interval=0", "--temperature=1", "--logprobs=1", "--progress-interval=600")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake model; no answer ends early."""
    return write_fake_folder(tmp_path_factory.mktemp("model") / "fake", eos_every=0)


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run on a disk."""
    folder = tmp_path_factory.mktemp("disk")
    write_rows(folder / "in" / "a.parquet", ROWS, row_group_size=20)
    assert main(run_flags(folder / "in" / "a.parquet", folder / "out", model, *SOON)) == OK
    return folder / "out"


def placeless(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the input's place."""
    return [{name: value for name, value in row.items() if name != "shard"} for row in timeless(rows)]


def flags_in(store: Bucket, model: Path) -> list[str]:
    """A job whose input and output are in the store."""
    if "in/a.parquet" not in store.names():
        store.put("in/a.parquet", parquet_bytes(ROWS, row_group_size=20))
    return run_flags(f"{store.uri}/in/a.parquet", f"{store.uri}/out", model, *SOON)


def test_a_store_that_fails_every_third_write(model: Path, undisturbed: Path) -> None:
    """Failed writes are tried again: the job ends well, with the same bits."""
    with bucket("store") as store:
        flags = flags_in(store, model)
        store.faults = StoreFaults(failed_writes=3, seed=2)
        assert main(flags) == OK
        assert store.failed > 3
        assert placeless(stored_rows(f"{store.uri}/out")) == placeless(published(undisturbed))


@pytest.mark.parametrize("within", ["_journal/", "/results/"])
def test_a_store_that_takes_nothing_ends_the_job_and_the_next_run_goes_on(
        model: Path, undisturbed: Path, capsys: pytest.CaptureFixture[str], within: str) -> None:
    """Nobody is told that answers are safe that are not: exit 1.  When the store works again, so does the command."""
    with bucket("store") as store:
        flags = flags_in(store, model)
        store.faults = StoreFaults(failed_writes=1, within=within)
        assert main(flags) == FATAL
        assert "the job stopped" in capsys.readouterr().err.splitlines()[-1]
        assert "out/_SUCCESS" not in store.names()
        store.faults = StoreFaults()
        assert main(flags) == OK
        assert placeless(stored_rows(f"{store.uri}/out")) == placeless(published(undisturbed))


def test_parts_that_vanish_after_they_were_listed(model: Path, undisturbed: Path) -> None:
    """Another run may have merged them: their rows are computed again where nobody else has them."""
    with bucket("store") as store:
        flags = flags_in(store, model)
        assert main(flags) == OK
        for name in store.names("out/results/") + store.names("out/_units/"):
            store.delete(name)
        store.faults = StoreFaults(vanishing=3, within="_journal/", seed=1)
        assert main(flags) == OK
        assert store.lost > 0
        assert placeless(stored_rows(f"{store.uri}/out")) == placeless(published(undisturbed))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 48 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", place], check=True)


def test_a_full_disk_ends_the_job_and_the_next_run_goes_on(
        model: Path, undisturbed: Path, small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 1, the cause in the last line; with more room the same command finishes with the same bits."""
    source = undisturbed.parent / "in" / "a.parquet"
    flags = run_flags(source, small_disk / "out", model, *SOON)
    assert main(flags) == FATAL
    last = capsys.readouterr().err.splitlines()[-1]
    assert "No space left on device" in last
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    assert main(flags) == OK
    assert differences(undisturbed, small_disk / "out") == []
    assert len(published_rows(small_disk / "out")) == len(ROWS)
