"""Laws of weight files: the format's own rules, and which files of a folder are read."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from batchgen_beam.errors import CheckpointError
from batchgen_beam.weights.checkpoint import check_checkpoint
from batchgen_beam.weights.headers import read_header
from batchgen_beam.weights.shards import find_shards, read_tensors
from tests.weights.tiny_checkpoint import INDEX, edit_index, tensors, write_config, write_shards, write_single


def raw_file(path: Path, header: object, data: bytes = b"") -> Path:
    """A file with this header (bytes are written as they are) and these tensor bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(start: int, end: int, dtype: str = "F32", shape: tuple[int, ...] = (1,)) -> dict[str, object]:
    """One tensor of a header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def test_header_of_a_sound_file(tmp_path: Path) -> None:
    """Names, number formats, shapes and byte ranges are those that were written; metadata is no tensor."""
    stored = {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.ones(2, dtype=torch.bfloat16),
              "none": torch.empty(0, 4), "one": torch.tensor(2.0)}
    save_file(stored, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = read_header(tmp_path / "x.safetensors")
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        "a": ("F32", (2, 3)), "b": ("BF16", (2,)), "none": ("F32", (0, 4)), "one": ("F32", ())}
    data = (tmp_path / "x.safetensors").read_bytes()[found["a"].start : found["a"].end]
    assert data == stored["a"].numpy().tobytes()


@pytest.mark.parametrize("keep", [0, 5, 8, 40, -1])
def test_truncated(tmp_path: Path, keep: int) -> None:
    """A file cut anywhere is refused as truncated, by name."""
    file = write_single(tmp_path, tensors()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        check_checkpoint(tmp_path)


def test_trailing_bytes(tmp_path: Path) -> None:
    """More bytes than the header describes are refused as corrupt."""
    file = write_single(tmp_path, tensors()) / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is corrupt"):
        check_checkpoint(tmp_path)


@pytest.mark.parametrize(("header", "data", "message"), [
    (b"{]", b"", "its header is not valid JSON"),
    ([1], b"", "its header must hold a JSON object, it holds list"),
    ({"a": 3}, b"", "entry of a can't be read"),
    ({"a": {"dtype": "F32"}}, b"", "entry of a can't be read"),
    ({"a": entry(0, 4, dtype="X9")}, bytes(4), "entry of a can't be read"),
    ({"a": entry(0, 4, shape=(2,))}, bytes(4), r"a is F32 \[2\] in bytes 0:4"),
    ({"a": entry(0, 4, shape=(-1, -1))}, bytes(4), r"a is F32"),
    ({"a": entry(4, 8)}, bytes(8), "a begins at byte"),
    ({"a": entry(0, 4), "b": entry(2, 6)}, bytes(6), "b begins at byte"),
])
def test_corrupt_headers(tmp_path: Path, header: object, data: bytes, message: str) -> None:
    """A header that is no header, or whose tensors overlap, leave holes or contradict themselves, is refused."""
    with pytest.raises(CheckpointError, match=rf"x\.safetensors is corrupt: .*{message}"):
        read_header(raw_file(tmp_path / "x.safetensors", header, data))


def test_lfs_pointer(tmp_path: Path) -> None:
    """A Git LFS pointer is named as such, with the remedy."""
    write_config(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match=r"is a Git LFS pointer.*git lfs pull"):
        check_checkpoint(tmp_path)


@pytest.mark.parametrize(("files", "message"), [
    ([], r"no safetensors file \(it has config\.json\)"),
    (["pytorch_model.bin"], r"only pickled weights \(pytorch_model\.bin\)"),
    (["consolidated.00.pth", "model.pt"], r"only pickled weights \(consolidated\.00\.pth, model\.pt\)"),
    (["model.Q4_K_M.gguf"], r"holds GGUF files \(model\.Q4_K_M\.gguf\); name the file itself"),
])
def test_folders_without_safetensors(tmp_path: Path, files: list[str], message: str) -> None:
    """What a folder holds instead of safetensors is named; pickles are never opened."""
    write_config(tmp_path)
    for name in files:
        (tmp_path / name).write_bytes(b"\x80\x04")
    with pytest.raises(CheckpointError, match=message):
        check_checkpoint(tmp_path)


def test_folders_that_are_none(tmp_path: Path) -> None:
    """A missing folder, a file and an empty folder are refused by name."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name, message in (("none", "is no folder"), ("file", "is no folder"), ("empty", r"config\.json is missing")):
        with pytest.raises(CheckpointError, match=message) as caught:
            check_checkpoint(tmp_path / name)
        assert name in str(caught.value)


def test_index_decides_which_files_are_read(tmp_path: Path) -> None:
    """Files beside the shards that the index does not name (`consolidated.safetensors`) are not looked at."""
    folder = write_shards(tmp_path, tensors())
    (folder / "consolidated.safetensors").write_bytes(b"not even a header")
    (folder / "model.safetensors").write_bytes(b"nor this")
    assert len(check_checkpoint(folder).tensors) == 21
    assert [file.name for file in find_shards(folder)] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def test_single_file_of_another_name(tmp_path: Path) -> None:
    """One file without index may have any name that does not say that it is a part."""
    write_single(tmp_path, tensors())
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert len(check_checkpoint(tmp_path).tensors) == 21


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {}}', '{"weight_map": {"a": "../b.safetensors"}}',
                                  '{"weight_map": {"a": 3}}', '{"weight_map": ["a"]}', "{}"])
def test_bad_index(tmp_path: Path, text: str) -> None:
    """An index that is none, is empty, or points outside the folder is refused by name."""
    write_config(tmp_path)
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        check_checkpoint(tmp_path)


def test_tensor_in_two_files(tmp_path: Path) -> None:
    """A tensor stored twice is refused: which one is meant can't be known."""
    folder = write_shards(tmp_path, tensors())
    save_file({"model.norm.weight": torch.ones(8)}, folder / "more.safetensors")
    edit_index(folder, {"model.norm.weight": "more.safetensors"})
    with pytest.raises(CheckpointError, match=r"holds tensors that another file holds too: model\.norm\.weight"):
        read_tensors(folder)
