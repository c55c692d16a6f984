"""Laws of models on stores: one copy for each host and version, whole or not there, and what went wrong by name."""

from __future__ import annotations

import multiprocessing
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from batchgen_beam.errors import CheckpointError, OptionError
from batchgen_beam.text.fake_folder import write_fake_folder
from batchgen_beam.transforms.model_store import resolve_model
from tests.support.odd_stores import OddStore
from tests.weights.gguf_files import VOCABULARY, file_tensors, hub_tensors, metadata, write_gguf

pytestmark = pytest.mark.timeout(60)

WEIGHTS = bytes(range(256)) * 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as a hub gives it: with files that no run reads."""
    path = write_fake_folder(tmp_path_factory.mktemp("model") / "fake")
    (path / "model.safetensors").write_bytes(WEIGHTS)
    (path / "pytorch_model.bin").write_bytes(b"a pickle")
    (path / "README.md").write_text("words")
    (path / "onnx").mkdir()
    (path / "onnx" / "config.json").write_text("{}")
    return path


@pytest.fixture
def odd(folder: Path) -> Iterator[str]:
    """The URI of the folder on a store with faults, none of them set."""
    OddStore.reset()
    upload(folder, "odd://models/fake")
    yield "odd://models/fake"
    OddStore.reset()


def upload(folder: Path, uri: str) -> None:
    """Put the whole folder there."""
    store, path = fsspec.core.url_to_fs(uri)
    for file in folder.rglob("*"):
        if file.is_file():
            store.pipe(f"{path}/{file.relative_to(folder)}", file.read_bytes())


def visible(cache: Path) -> list[str]:
    """Names in the cache that a run would take for models."""
    return sorted(path.name for path in cache.glob("[!.]*") if path.is_dir())


def test_a_folder_is_copied_once_without_what_no_run_reads(folder: Path, tmp_path: Path) -> None:
    """No pickles, no folders within; the second call finds the copy of the first."""
    upload(folder, "memory://copied/fake")
    first = resolve_model("memory://copied/fake/", tmp_path)
    wanted = {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
              "chat_template.jinja", "model.safetensors"}
    assert {path.name: path.read_bytes() for path in first.iterdir()} == {
        name: (folder / name).read_bytes() for name in wanted}
    before = (first / "model.safetensors").stat()
    assert resolve_model("memory://copied/fake", tmp_path) == first
    assert (first / "model.safetensors").stat() == before
    assert visible(tmp_path) == [first.name]


def test_a_gguf_file_is_copied_and_converted(tmp_path: Path) -> None:
    """The folder is the one that a local file of these bytes gives."""
    tokens = [*(f"t{index}" for index in range(VOCABULARY - 3)), "a", "b", "ab"]
    keys = metadata(tokenizer__ggml__tokens=tokens, tokenizer__ggml__merges=["a b"])
    file = write_gguf(tmp_path / "tiny.gguf", file_tensors(hub_tensors()), keys)
    fsspec.filesystem("memory").pipe("/gguf/tiny.gguf", file.read_bytes())
    there = resolve_model("memory://gguf/tiny.gguf", tmp_path / "cache")
    assert there == resolve_model(str(file), tmp_path / "cache")
    assert resolve_model("memory://gguf/tiny.gguf", tmp_path / "cache") == there


def test_a_changed_model_is_fetched_anew(odd: str, tmp_path: Path) -> None:
    """Other bytes of the same size under the same name: by time, or by checksum where the store gives one."""
    first = resolve_model(odd, tmp_path)
    store = fsspec.filesystem("odd")
    store.pipe("/models/fake/model.safetensors", WEIGHTS[::-1])
    second = resolve_model(odd, tmp_path)
    assert (second / "model.safetensors").read_bytes() == WEIGHTS[::-1]
    assert visible(tmp_path) == sorted([first.name, second.name])
    OddStore.tags["/models/fake/model.safetensors"] = "one"
    third = resolve_model(odd, tmp_path)
    OddStore.tags["/models/fake/model.safetensors"] = "two"
    assert resolve_model(odd, tmp_path) not in (first, second, third)


def test_a_model_that_was_only_touched_is_not_fetched_again(odd: str, tmp_path: Path) -> None:
    """The same checksums under another time are the same model."""
    for place, facts in fsspec.filesystem("odd").find("/models/fake", detail=True).items():
        OddStore.tags[place] = f"tag {facts['size']}"
    first = resolve_model(odd, tmp_path)
    fsspec.filesystem("odd").pipe("/models/fake/model.safetensors", WEIGHTS)
    assert resolve_model(odd, tmp_path) == first


def _resolve(arguments: tuple[str, str]) -> tuple[str, int]:
    model, cache = arguments
    found = resolve_model(model, Path(cache))
    return str(found), (found / "model.safetensors").stat().st_ino


def test_processes_of_a_host_copy_once(folder: Path, tmp_path: Path) -> None:
    """All that ask at the same time get the copy of one of them, whole."""
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        found = pool.map(_resolve, [(f"local://{folder}", str(tmp_path))] * 3)
    assert len(set(found)) == 1
    assert (Path(found[0][0]) / "model.safetensors").read_bytes() == WEIGHTS
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_a_broken_copy_is_not_seen_and_goes_on_where_it_was(odd: str, folder: Path, tmp_path: Path) -> None:
    """The error names the model; the next call reads only what is missing, and the copy is whole."""
    OddStore.breaks_after = 70_000
    with pytest.raises(CheckpointError, match=f"model '{odd}' can't be read: connection reset by peer"):
        resolve_model(odd, tmp_path)
    assert visible(tmp_path) == []
    OddStore.breaks_after, had = None, sum(OddStore.reads)
    whole = resolve_model(odd, tmp_path)
    assert (whole / "model.safetensors").read_bytes() == WEIGHTS
    assert had >= 70_000
    assert sum(OddStore.reads) == sum(path.stat().st_size for path in whole.iterdir())


def test_what_a_dead_copy_of_another_version_left_is_removed(odd: str, tmp_path: Path) -> None:
    """It would never be gone on with; the copies of other models stay."""
    name = resolve_model(odd, tmp_path).name
    shutil.rmtree(tmp_path / name)
    (tmp_path / f".{name[:-4]}dead.partial").mkdir()
    (tmp_path / ".model-other-one.partial").mkdir()
    resolve_model(odd, tmp_path)
    assert sorted(path.name for path in tmp_path.glob(".*")) == [".model-other-one.partial"]


def test_a_model_that_changes_while_it_is_copied_is_refused(odd: str, tmp_path: Path) -> None:
    """Files of two versions never make one model."""
    place = "/models/fake/model.safetensors"
    OddStore.on_read = lambda: OddStore.tags.update({place: "new"})
    with pytest.raises(CheckpointError, match=f"model {odd} was changed while it was copied"):
        resolve_model(odd, tmp_path)
    assert visible(tmp_path) == []


def test_a_disk_that_is_too_small_is_refused_before_anything_is_read(odd: str, tmp_path: Path) -> None:
    """Both numbers, the flag and the remedy."""
    OddStore.sizes["/models/fake/model.safetensors"] = 10**18
    with pytest.raises(OptionError, match=rf"model {odd} needs 1,000,000,000,0[\d,]+ bytes, "
                                          rf"--model-cache={re.escape(str(tmp_path))} has [\d,]+ bytes free; "):
        resolve_model(odd, tmp_path)
    assert OddStore.reads == []


def test_a_store_that_gives_too_few_bytes_is_named(odd: str, tmp_path: Path) -> None:
    """The copy does not count as whole."""
    OddStore.sizes["/models/fake/model.safetensors"] = len(WEIGHTS) + 7
    with pytest.raises(CheckpointError, match=r"fake/model\.safetensors gave 102,400 of 102,407 bytes"):
        resolve_model(odd, tmp_path)
    assert visible(tmp_path) == []


def test_a_clients_own_errors_are_the_users_mistakes(odd: str, tmp_path: Path) -> None:
    """Errors that are no OSError: here the AWS client's of a user without credentials."""
    OddStore.locked = True
    with pytest.raises(CheckpointError, match=r"odd://models/fake' can't be read: Unable to locate credentials"):
        resolve_model(odd, tmp_path)


def test_a_cache_that_can_not_be_written_is_named(odd: str, tmp_path: Path) -> None:
    """By its flag."""
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match=rf"--model-cache={re.escape(str(tmp_path / 'file'))} can't hold {odd}"):
        resolve_model(odd, tmp_path / "file")


@pytest.mark.parametrize(("model", "message"), [
    ("odd://models/absent", r"odd://models/absent': there is neither a folder nor a file"),
    ("odd://models/empty", r"odd://models/empty' is a folder without config.json and safetensors"),
    ("nosuch://bucket/model", r"nosuch://bucket/model' can't be read: Protocol not known: nosuch; gs:// needs pip "),
    ("dropbox://model", r"dropbox://model' can't be read: .*dropbox"),
])
def test_what_is_no_model_is_refused_by_name(odd: str, model: str, message: str, tmp_path: Path) -> None:
    """With what would help."""
    fsspec.filesystem("odd").pipe("/models/empty/README.md", b"words")
    with pytest.raises(CheckpointError, match=message):
        resolve_model(model, tmp_path)
