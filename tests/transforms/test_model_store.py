"""Laws of the model store: a folder is used as it is, a GGUF file is converted once, everything else is refused.

What comes from stores: `test_model_download`.
"""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from batchgen_beam.errors import CheckpointError, OptionError
from batchgen_beam.text.fake_folder import write_fake_folder
from batchgen_beam.transforms.model_store import resolve_model
from tests.weights.gguf_files import VOCABULARY, file_tensors, hub_tensors, metadata, write_gguf

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GGUF file."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return _write(path, merge="a b")


def _write(path: Path, *, merge: str) -> Path:
    tokens = [*(f"t{index}" for index in range(VOCABULARY - 3)), "a", "b", "ab"]
    keys = metadata(tokenizer__ggml__tokens=tokens, tokenizer__ggml__merges=[merge])
    return write_gguf(path, file_tensors(hub_tensors()), keys)


def test_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    """No copy, no cache; a file:// URI and a worker: path name the same folder."""
    folder = write_fake_folder(tmp_path / "fake")
    for model in (f"{folder}", f"file://{folder}", f"FILE://{folder}", f"worker:{folder}", f"worker://{folder}"):
        assert resolve_model(model, tmp_path / "cache") == folder
    assert not (tmp_path / "cache").exists()


def test_a_gguf_file_becomes_a_folder_named_by_its_content(gguf: Path, tmp_path: Path) -> None:
    """The same bytes under another name give the same folder; it holds all that a checkpoint needs."""
    folder = resolve_model(str(gguf), tmp_path)
    other = tmp_path / "renamed.gguf"
    other.write_bytes(gguf.read_bytes())
    assert resolve_model(str(other), tmp_path) == folder
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= {
        path.name for path in folder.iterdir()}


def _convert(arguments: tuple[str, str]) -> tuple[str, int]:
    model, cache = arguments
    folder = resolve_model(model, Path(cache))
    return str(folder), (folder / "model.safetensors").stat().st_ino


def test_processes_that_ask_at_once_convert_once(gguf: Path, tmp_path: Path) -> None:
    """All get the same complete folder, made by one of them; nothing half made is left beside it."""
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        found = pool.map(_convert, [(str(gguf), str(tmp_path))] * 3)
    assert len(set(found)) == 1
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".lock"]


def test_a_failed_conversion_leaves_nothing(tmp_path: Path) -> None:
    """A file whose tokenizer can't be used is refused each time by name, and no folder passes for its model."""
    broken = _write(tmp_path / "broken.gguf", merge="a x")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"broken\.gguf: tokenizer\.ggml\.merges"):
            resolve_model(str(broken), tmp_path / "cache")
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_what_a_killed_conversion_left_is_removed(gguf: Path, tmp_path: Path) -> None:
    """By the next conversion of the same file; the folders of other files stay."""
    name = resolve_model(str(gguf), tmp_path / "first").name
    cache = tmp_path / "cache"
    for left in (f".{name}-dead", ".gguf-other-v1-alive"):
        (cache / left).mkdir(parents=True)
    resolve_model(str(gguf), cache)
    assert sorted(path.name for path in cache.iterdir() if path.is_dir()) == [".gguf-other-v1-alive", name]


def test_a_cache_that_can_not_be_written_is_refused_by_name(gguf: Path, tmp_path: Path) -> None:
    """A file, or below one; a folder without permission is the same error of the system."""
    (tmp_path / "file").touch()
    for cache in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OptionError, match=f"--model-cache={cache} can't hold the converted model"):
            resolve_model(str(gguf), cache)


@pytest.mark.parametrize(("model", "message"), [
    ("/nowhere/model", r"/nowhere/model.*neither a folder nor a file of that name$"),
    ("file:///nowhere/model", r"neither a folder nor a file of that name on \S+; it has to be there on every worker"),
    ("worker:/nowhere/model", r"neither a folder nor a file of that name on \S+; it has to be there on every worker"),
])
def test_what_is_no_model_is_refused_by_name(model: str, message: str, tmp_path: Path) -> None:
    """The message names the model and what may be given instead."""
    with pytest.raises(CheckpointError, match=message):
        resolve_model(model, tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    """A safetensors file alone is no model; the message asks for its folder."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"\0" * 16)
    with pytest.raises(CheckpointError, match="no GGUF file; give the folder"):
        resolve_model(str(file), tmp_path)
