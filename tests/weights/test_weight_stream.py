"""The ring of buffers: what is used is what was stored, whatever was read ahead, and faults reach who asked."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from batchgen_beam.errors import FatalError
from batchgen_beam.kernels.packing import packing_of
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.weights.checkpoint import check_checkpoint
from batchgen_beam.weights.direct_file import DirectFile
from batchgen_beam.weights.packed_copy import PackedCopy, make_copy
from batchgen_beam.weights.packed_format import DamagedCopy
from batchgen_beam.weights.residency import Unit, streaming_order
from batchgen_beam.weights.tiered_loader import plan_copy, weight_units
from batchgen_beam.weights.weight_stream import WeightStream
from tests.models.tiny import TINIES, random_model

KERNELS = TorchKernels(torch.float32)
EXPERTS = 8
LAYERS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Mixtral."""
    path = tmp_path_factory.mktemp("stream") / "model"
    random_model(TINIES["mixtral"], 0).save_pretrained(path)
    return path


class Rig:
    """A copy and a stream of all its units."""

    def __init__(self, folder: Path, cache: Path, *, buffers: int,
                 open_file: Callable[[Path], DirectFile] = DirectFile) -> None:
        plan, _ = plan_copy(check_checkpoint(folder), KERNELS, packing_of(KERNELS))
        self.copy: PackedCopy = make_copy(plan, cache)
        self.order = streaming_order(weight_units(plan))
        self.largest = max(unit.size for unit in self.order)
        self.stream = WeightStream(self.copy, self.order, buffers=buffers, buffer_bytes=self.largest,
                                   open_file=open_file)

    def stored(self, unit: Unit) -> bytes:
        """The unit's first tensor as the file has it."""
        file = self.copy.layers[unit.layer]
        area = next(area for area in file.header.areas if area.name == unit.name)
        tensor = next(iter(area.tensors.values()))
        begin = file.begin + area.offset + tensor.offset
        return file.path.read_bytes()[begin:begin + tensor.size]

    def used(self, unit: Unit) -> bytes:
        """The same through the stream."""
        return next(iter(self.stream.use(unit.name).values())).numpy().tobytes()

    def experts(self, layer: int) -> list[Unit]:
        """Of one layer."""
        return [unit for unit in self.order if unit.layer == layer and unit.rank is not None]


@pytest.fixture
def rigs(folder: Path, tmp_path: Path) -> Iterator[list[Rig]]:
    """Rigs that are checked and closed at the end."""
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.stream.check_integrity()
        rig.stream.close()
        rig.stream.close()


@pytest.fixture
def rig(folder: Path, tmp_path: Path, rigs: list[Rig]) -> Rig:
    """All of a tiny Mixtral through three buffers."""
    rigs.append(Rig(folder, tmp_path, buffers=3))
    return rigs[0]


@pytest.mark.parametrize("buffers", [2, 3, 7, 40])
def test_any_order_of_use_gives_what_was_stored(folder: Path, tmp_path: Path, rigs: list[Rig], buffers: int) -> None:
    """In order, over and over, and at random, with true and with wrong expectations, also with room for all units."""
    rig = Rig(folder, tmp_path, buffers=buffers)
    rigs.append(rig)
    stored = {unit.name: rig.stored(unit) for unit in rig.order}
    for unit in [*rig.order, *rig.order]:
        assert rig.used(unit) == stored[unit.name], unit
    draw = random.Random(buffers)
    for _ in range(300):
        layer = draw.randrange(LAYERS)
        chosen = sorted(draw.sample(rig.experts(layer), draw.randrange(EXPERTS + 1)), key=lambda unit: unit.rank or 0)
        rig.stream.expect(layer, [unit.name for unit in chosen])
        rig.stream.check_integrity()
        for unit in chosen if draw.random() < 0.8 else draw.sample(rig.order, 3):
            assert rig.used(unit) == stored[unit.name], unit
    assert not rig.stream.stats().unused_bytes % 4096


def step(rig: Rig, chosen: dict[int, list[int]]) -> None:
    """One forward pass in which some experts of each layer are chosen."""
    for layer in range(LAYERS):
        rig.stream.use(f"layers.{layer}.attention")
        rig.stream.expect(layer, [f"layers.{layer}.experts.{e}" for e in chosen[layer]])
        for e in chosen[layer]:
            rig.stream.use(f"layers.{layer}.experts.{e}")


def test_experts_that_no_token_chose_are_not_read(rig: Rig) -> None:
    """Bytes read in small steps are those of attention and of the chosen experts, and none was read in vain."""
    chosen = {0: [1, 6], 1: [0], 2: [3, 4, 7]}
    for _ in range(4):
        step(rig, chosen)
    attention, expert = rig.order[0].size, rig.order[1].size
    stats = rig.stream.stats()
    assert stats.read_bytes - 4 * (LAYERS * attention + 6 * expert) in (0, attention)  # one is ahead already
    assert stats.unused_bytes == 0


def test_steps_that_need_every_expert_read_each_unit_once(rig: Rig) -> None:
    """Nothing is read twice or in vain: four steps read four times the model, and at most what is ahead."""
    for _ in range(4):
        step(rig, {layer: list(range(EXPERTS)) for layer in range(LAYERS)})
    whole, stats = sum(unit.size for unit in rig.order), rig.stream.stats()
    assert 0 <= stats.read_bytes - 4 * whole <= 2 * rig.largest
    assert stats.unused_bytes == 0


def test_what_is_read_in_vain_is_counted(rig: Rig) -> None:
    """Bytes read are those used, those counted as unused, and at most what is ahead: after steps that need every expert
    more is read ahead than a step of one expert uses."""
    every = {layer: list(range(EXPERTS)) for layer in range(LAYERS)}
    few = {0: [7], 1: [6], 2: [7]}
    for _ in range(30):
        step(rig, every)
        step(rig, few)
    attention, expert = rig.order[0].size, rig.order[1].size
    used = 30 * (2 * LAYERS * attention + (EXPERTS + 1) * LAYERS * expert)
    stats = rig.stream.stats()
    assert stats.unused_bytes > 0
    assert 0 <= stats.read_bytes - stats.unused_bytes - used <= 2 * rig.largest


def test_all_memory_is_the_buffers(rig: Rig) -> None:
    """Three buffers of the largest unit."""
    assert rig.stream.stats().buffer_bytes == 3 * rig.largest


def test_a_flipped_byte_is_named_and_the_file_taken_away(folder: Path, tmp_path: Path, rigs: list[Rig]) -> None:
    """Who uses the unit gets the area's name; other units still come, and the next copy has the file again."""
    rig = Rig(folder, tmp_path, buffers=2)
    broken = rig.experts(1)[5]
    flip(rig.copy, broken)
    rig.stream.close()
    rig = Rig(folder, tmp_path, buffers=2)
    rigs.append(rig)
    assert rig.used(rig.order[0]) == rig.stored(rig.order[0])
    with pytest.raises(DamagedCopy, match=r"layer-00001\.packed: area layers\.1\.experts\.5 is damaged \(CRC-32 "):
        rig.stream.use(broken.name)
    assert not rig.copy.layers[1].path.exists()
    assert rig.used(rig.order[0]) == rig.stored(rig.order[0])
    again = Rig(folder, tmp_path, buffers=2)
    rigs.append(again)
    assert again.used(broken) == again.stored(broken)


def flip(copy: PackedCopy, unit: Unit) -> None:
    """Change one bit of the unit on disk."""
    file = copy.layers[unit.layer]
    area = next(area for area in file.header.areas if area.name == unit.name)
    with file.path.open("r+b") as stream:
        stream.seek(file.begin + area.offset + area.size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 4]))


def test_a_disks_fault_reaches_the_caller_by_name(folder: Path, tmp_path: Path, rigs: list[Rig]) -> None:
    """A file that became shorter and a file that can't be read are named in the thread that asked."""
    def folder_for_layer_1(path: Path, flags: int) -> int:
        return os.open(path.parent if path.stem == "layer-00001" else path, flags)

    rig = Rig(folder, tmp_path, buffers=2, open_file=lambda path: DirectFile(path, open_file=folder_for_layer_1))
    rigs.append(rig)
    path = rig.copy.layers[2].path
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DamagedCopy, match=r"layer-00002\.packed ends at byte \d+, \d+ too early"):
        rig.stream.use(rig.experts(2)[-1].name)
    for _ in range(2):
        with pytest.raises(FatalError, match=r"layer-00001\.packed can't be read: Is a directory"):
            rig.stream.use(rig.experts(1)[3].name)


def test_a_file_system_without_direct_io_is_read_all_the_same(folder: Path, tmp_path: Path, rigs: list[Rig],
                                                              caplog: pytest.LogCaptureFixture) -> None:
    """Whether opening or reading is what it refuses; it is said once."""
    def refuse(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return os.open(path, flags)

    rig = Rig(folder, tmp_path, buffers=2, open_file=lambda path: DirectFile(path, open_file=refuse))
    rigs.append(rig)
    for unit in rig.order:
        assert rig.used(unit) == rig.stored(unit)
    assert (rig.stream.stats().direct_files, rig.stream.stats().files) == (0, LAYERS)
    assert sum("no direct I/O" in record.getMessage() for record in caplog.records) == 1
    path = rig.copy.layers[0].path
    one = DirectFile(path)
    target = memoryview(bytearray(4096 + 8))[8:]
    assert one.read(0, target) or not one.direct
    assert bytes(target[:8]) == path.read_bytes()[:8]
    one.close()


def test_what_a_stream_did_is_said_once(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """When it is closed, also where it has experts alone and none is being read."""
    experts = [unit for layer in range(LAYERS) for unit in rig.experts(layer)]
    stream = WeightStream(rig.copy, experts, buffers=2, buffer_bytes=rig.largest)
    stream.expect(1, [rig.experts(1)[0].name])
    stream.use(rig.experts(1)[0].name)
    with caplog.at_level("INFO"):
        stream.close()
        stream.close()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["streamed weights"]


def test_a_closed_stream_leaves_no_thread(folder: Path, tmp_path: Path) -> None:
    """Also while it is reading, and when a file of the copy is gone."""
    before = threading.active_count()
    rig = Rig(folder, tmp_path, buffers=4)
    rig.stream.close()
    rig.copy.layers[1].path.unlink()
    with pytest.raises(FatalError, match=r"layer-00001\.packed can't be read: No such file"):
        WeightStream(rig.copy, rig.order, buffers=2, buffer_bytes=rig.largest)
    assert threading.active_count() == before
