"""The packed copy is made once, whatever kills its making, and is never taken for another; damage is named."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from batchgen_beam.errors import CheckpointError, OptionError
from batchgen_beam.weights import packed_copy
from batchgen_beam.weights.headers import read_header
from batchgen_beam.weights.packed_copy import PackedCopy, make_copy
from batchgen_beam.weights.packed_format import PackedHeader, encode, read_packed_header
from batchgen_beam.weights.packing import Product, StoredForm
from tests.models.tiny import TINIES, random_model
from tests.weights.convert_until import CountingPacking, copy_plan

PRODUCTS = 2 + 8 * 2
"""Of a layer: two of attention, two of each expert."""

LAYERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral."""
    path = tmp_path_factory.mktemp("copy") / "model"
    random_model(TINIES["mixtral"], 0).save_pretrained(path)
    return path


class OddPacking(CountingPacking):
    """Keeps seven numbers of each part, so that there is room between tensors."""

    def forms(self, product: Product) -> tuple[StoredForm, ...]:
        """As `store` gives them."""
        return tuple(StoredForm(dtype=torch.float32, shape=(7,)) for _ in product.parts)

    def store(self, product: Product, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The first of each."""
        return tuple(weight.reshape(-1)[:7].clone() for weight in weights)


def converted(folder: Path, cache: Path) -> tuple[PackedCopy, int]:
    """The copy, and how many products were packed for it now."""
    packing = CountingPacking()
    return make_copy(copy_plan(folder, packing), cache), packing.stored


def contents(copy: PackedCopy) -> list[bytes]:
    """Its files."""
    return [file.path.read_bytes() for file in copy.layers.values()]


def flip(path: Path, offset: int) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1]))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said."""
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_a_copy_is_made_once(folder: Path, tmp_path: Path) -> None:
    """The second run packs nothing; the bytes are those that a copy elsewhere has."""
    first, packed = converted(folder, tmp_path / "a")
    assert packed == LAYERS * PRODUCTS
    second, packed = converted(folder, tmp_path / "a")
    assert packed == 0
    assert contents(first) == contents(second) == contents(converted(folder, tmp_path / "b")[0])


def test_a_source_that_cannot_be_read_is_named(folder: Path, tmp_path: Path) -> None:
    """As the checkpoint's fault, with the tensor, not as one of the folder that the copy goes to."""
    broken = tmp_path / "model"
    shutil.copytree(folder, broken)
    plan = copy_plan(broken, CountingPacking())
    shard = next(path for path in broken.glob("*.safetensors"))
    shard.unlink()
    shard.mkdir()
    with pytest.raises(CheckpointError, match=rf"{shard}: tensor .* can't be read: Is a directory"):
        make_copy(plan, tmp_path / "cache")


@pytest.mark.parametrize("products", [0, PRODUCTS - 1, PRODUCTS, 3 * PRODUCTS - 1])
def test_a_killed_conversion_goes_on(folder: Path, tmp_path: Path, products: int) -> None:
    """A process killed before any product leaves no half file; the next run makes only the layers that are missing."""
    with subprocess.Popen([sys.executable, "-m", "tests.weights.convert_until", folder, tmp_path, str(products)],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"waiting\n"
        child.kill()
    copy, packed = converted(folder, tmp_path)
    assert packed == PRODUCTS * (LAYERS - products // PRODUCTS)
    whole, _ = converted(folder, tmp_path / "undisturbed")
    assert contents(copy) == contents(whole)
    left = {path.name for path in copy.layers[0].path.parent.iterdir()}
    assert left == {f"layer-0000{layer}.packed" for layer in range(LAYERS)}


def test_a_conversion_that_goes_on_reads_again_what_is_there(folder: Path, tmp_path: Path,
                                                             caplog: pytest.LogCaptureFixture) -> None:
    """A byte that was flipped meanwhile is found, named and repaired, also in a header, and so is a cut file."""
    copy, _ = converted(folder, tmp_path)
    whole = contents(copy)
    copy.layers[2].path.unlink()
    area = copy.layers[0].header.areas[3]
    flip(copy.layers[0].path, copy.layers[0].begin + area.offset + 5)
    again, packed = converted(folder, tmp_path)
    assert (packed, contents(again)) == (2 * PRODUCTS, whole)
    assert f"{copy.layers[0].path}: area {area.name} is damaged (CRC-32 " in warnings(caplog)[0]
    caplog.clear()
    flip(copy.layers[0].path, 40)
    os.truncate(copy.layers[1].path, copy.layers[1].path.stat().st_size - 1)
    assert (converted(folder, tmp_path)[1], contents(again)) == (2 * PRODUCTS, whole)
    assert f"{copy.layers[0].path}: its header is damaged (CRC-32 " in warnings(caplog)[0]
    assert f"{copy.layers[1].path} is truncated: " in warnings(caplog)[1]


@pytest.mark.parametrize(("change", "reason"), [
    (lambda header: replace(header, version=0), "its format version is 0, this run needs 1"),
    (lambda header: replace(header, byteorder="middle"), "its byte order is middle, this run needs little"),
    (lambda header: replace(header, source="0" * 64), f"its source weights is {'0' * 64}, this run needs "),
    (lambda header: replace(header, packing="plain v0"), "its packing is plain v0, this run needs plain v1"),
    (lambda header: replace(header, dtype="float64"), "its dtype is float64, this run needs float32"),
    (lambda header: replace(header, layer=7), "its layer is 7, this run needs 1"),
    (lambda header: replace(header, areas=(*header.areas[:-1], replace(header.areas[-1], name="other"))),
     "its names or shapes are not those of the model"),
])
def test_a_stale_file_is_named_and_made_again(folder: Path, tmp_path: Path, reason: str,
                                              change: Callable[[PackedHeader], PackedHeader],
                                              caplog: pytest.LogCaptureFixture) -> None:
    """A whole file made for something else is never used, in whatever it differs."""
    copy, _ = converted(folder, tmp_path)
    whole, file = contents(copy), copy.layers[1]
    body = file.path.read_bytes()[file.begin:]
    file.path.write_bytes(encode(change(file.header)) + body)
    again, packed = converted(folder, tmp_path)
    assert (packed, contents(again)) == (PRODUCTS, whole)
    assert f"{file.path} is stale: {reason}" in warnings(caplog)[0]


def test_other_weights_have_another_copy(folder: Path, tmp_path: Path) -> None:
    """One changed weight, or another dtype, and all is packed anew beside the first copy, which stays whole."""
    copy, _ = converted(folder, tmp_path)
    whole = contents(copy)
    other = shutil.copytree(folder, tmp_path / "other")
    shard = other / "model.safetensors"
    flip(shard, read_header(shard)["model.layers.1.self_attn.q_proj.weight"].start)
    found, packed = converted(other, tmp_path)
    assert packed == LAYERS * PRODUCTS
    assert found.layers[0].path.parent != copy.layers[0].path.parent
    plan = replace(copy_plan(folder, CountingPacking()), dtype=torch.bfloat16)
    assert plan.folder_name != copy.layers[0].path.parent.name
    assert contents(converted(folder, tmp_path)[0]) == whole


def test_a_flipped_byte_in_a_shard_is_named(tmp_path: Path) -> None:
    """What a tensor was when it was first read is remembered: a layer that is made again from a shard that has changed
    since, at a place that the identity of its weights does not sample, is refused."""
    config = {**TINIES["mixtral"].keys, "num_hidden_layers": 2, "hidden_size": 512, "num_local_experts": 2,
              "intermediate_size": 2048}
    folder = tmp_path / "model"
    random_model(replace(TINIES["mixtral"], keys=config), 0).save_pretrained(folder)
    copy, _ = converted(folder, tmp_path)
    shard = folder / "model.safetensors"
    name = next(name for name in read_header(shard) if "layers.1." in name and "experts.0.w2" in name)
    tensor = read_header(shard)[name]
    flip(shard, tensor.start + 300_001)
    copy.layers[0].path.unlink()
    assert converted(folder, tmp_path)[1] > 0  # of the other layer nothing has changed
    file = copy.layers[1]
    flip(file.path, file.begin)
    with pytest.raises(CheckpointError, match="is damaged"):
        file.verify(file.header.areas[0], memoryview(file.path.read_bytes())[file.begin:])
    with pytest.raises(CheckpointError, match=rf"{shard}: tensor {name} has changed on disk since it was first read "
                                              r"\(CRC-32 [0-9a-f]{8}, was [0-9a-f]{8}\); fetch the file again"):
        converted(folder, tmp_path)


def test_a_full_disk_is_refused_with_the_numbers(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is written."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(packed_copy.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(OptionError, match=rf"need [\d,]+ more bytes, --model-cache={tmp_path} has 1,000 bytes free"):
        converted(folder, tmp_path)
    assert not list(tmp_path.glob("packed-*/*"))


def test_a_cache_that_is_no_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    """By the flag's name."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OptionError, match=f"--model-cache={tmp_path / 'file'} can't hold the packed weights: "):
        converted(folder, tmp_path / "file")


def test_a_header_says_what_lies_where(folder: Path, tmp_path: Path) -> None:
    """Each area begins at a page, is no larger than its tensors ask for, and names the source with its checksum."""
    copy, _ = converted(folder, tmp_path)
    for file in copy.layers.values():
        header, begin = read_packed_header(file.path)
        assert (header, begin) == (file.header, file.begin)
        assert begin % 4096 == 0
        assert all(area.offset % 4096 == 0 for area in header.areas)
        assert file.path.stat().st_size == begin + header.data_size
        assert len(header.sources) == 4 + 8 * 3
        assert "0" * 8 not in {source.crc for source in header.sources}


def test_a_checksum_is_that_of_the_bytes_as_they_lie(folder: Path, tmp_path: Path) -> None:
    """Of those between tensors too, which are zero."""
    copy = make_copy(copy_plan(folder, OddPacking()), tmp_path)
    for file in copy.layers.values():
        for area in file.header.areas:
            content = memoryview(file.path.read_bytes())[file.begin + area.offset:]
            file.verify(area, content)
            between = bytearray(content[:area.size])
            for tensor in area.tensors.values():
                assert any(between[tensor.offset : tensor.offset + tensor.size])
                between[tensor.offset : tensor.offset + tensor.size] = bytes(tensor.size)
            assert sum(tensor.size for tensor in area.tensors.values()) < len(between)
            assert not any(between)


def test_other_copies_are_named_with_their_size(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """When a copy is made beside them, and only then; none is touched."""
    caplog.set_level("INFO")
    first, _ = converted(folder, tmp_path)
    whole = contents(first)
    assert "other models" not in caplog.text
    make_copy(replace(copy_plan(folder, CountingPacking()), storage="other"), tmp_path)
    size = sum(len(content) for content in whole)
    assert f"beside them take {size:,} bytes: {first.layers[0].path.parent};" in caplog.text
    caplog.clear()
    assert contents(converted(folder, tmp_path)[0]) == whole
    assert not caplog.records
