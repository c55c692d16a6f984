"""A model's products as packed files on this machine: made once, found by what they are made from and for.

Owns the folder (`packed-<source>-<packing>-v<version>` in the model cache) and the making of what is missing in it:
under a file lock, each file under a temporary name, synced and renamed, so that a file of its own name is whole.  A
conversion that was killed goes on with the files that are missing, after those that are there were read again.
Guarantees: every area's bytes are those that were written (CRC-32); which bytes a checkpoint had is remembered
(`source_tensors`), whether they were right is not known.  Does not know architectures or kernels.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from batchgen_beam.errors import OptionError
from batchgen_beam.weights.file_lock import locked
from batchgen_beam.weights.headers import TensorFacts
from batchgen_beam.weights.packed_format import (
    FORMAT_VERSION,
    LINE,
    Area,
    DamagedCopy,
    PackedHeader,
    PackedTensor,
    SourceTensor,
    encode,
    pages,
    read_packed_header,
)
from batchgen_beam.weights.packing import Packing, Product
from batchgen_beam.weights.source_tensors import checked_sources, known_checksums

__all__ = ["CopyPlan", "PackedCopy", "PackedFile", "make_copy"]

LOG = logging.getLogger(__name__)

_NO_CRC = "0" * 8
_ENDING = ".packed"
_CONDEMNED = ".damaged"
_BLOCK = 1 << 22

Reader = Callable[[Mapping[str, TensorFacts]], Mapping[str, Tensor]]
"""Parameters by name from where they are stored, in the run's dtype, in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedFile:
    """A whole file of one layer; `begin` is where its first area lies."""

    path: Path
    header: PackedHeader
    begin: int

    def verify(self, area: Area, content: memoryview) -> None:
        """`DamagedCopy` unless the area has the bytes that were written.

        Then the file is taken away, so that the next conversion makes it again; what it says of its source stays known.
        """
        crc = f"{zlib.crc32(content[:area.size]):08x}"
        if crc != area.crc:
            self.path.replace(self.path.with_suffix(_CONDEMNED))
            raise DamagedCopy(f"{self.path}: area {area.name} is damaged (CRC-32 {crc}, written {area.crc}); run "
                              "again, and the file is made anew from the model")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCopy:
    """A complete copy: a file for each layer that has products."""

    folder: Path
    layers: Mapping[int, PackedFile]
    products: Mapping[str, tuple[Product, ...]]
    """By area."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """What a copy is made from: `products` within layers, `tensors` by parameter, `source` the weights' identity."""

    source: str
    packing: Packing
    dtype: torch.dtype
    products: tuple[Product, ...]
    tensors: Mapping[str, TensorFacts]
    read: Reader

    @property
    def prefix(self) -> str:
        """Common to the folders of all packings of these weights."""
        return f"packed-{self.source[:32]}-"

    @property
    def folder_name(self) -> str:
        """Other weights or another packing have another folder."""
        digest = hashlib.sha256(f"{self.packing.name} {self.dtype}".encode()).hexdigest()
        return f"{self.prefix}{digest[:16]}-v{FORMAT_VERSION}"

    def by_area(self) -> dict[str, tuple[Product, ...]]:
        """Products in order, by area."""
        areas: dict[str, tuple[Product, ...]] = {}
        for product in self.products:
            areas[product.area] = (*areas.get(product.area, ()), product)
        return areas

    def headers(self) -> dict[int, PackedHeader]:
        """For each layer what its file will hold, without checksums."""
        layers: dict[int, list[tuple[str, tuple[Product, ...]]]] = {}
        for name, products in self.by_area().items():
            layer = products[0].layer
            assert layer is not None, f"{name} is in no layer"
            layers.setdefault(layer, []).append((name, products))
        return {layer: self._header(layer, areas) for layer, areas in sorted(layers.items())}

    def _header(self, layer: int, areas: Iterable[tuple[str, tuple[Product, ...]]]) -> PackedHeader:
        laid: list[Area] = []
        offset = 0
        for name, products in areas:
            laid.append(self._area(name, products, offset))
            offset += pages(laid[-1].size)
        return PackedHeader(source=self.source, packing=self.packing.name, layer=layer, areas=tuple(laid),
                            dtype=str(self.dtype).removeprefix("torch."))

    def _area(self, name: str, products: Sequence[Product], offset: int) -> Area:
        tensors: dict[str, PackedTensor] = {}
        end = 0
        for product in products:
            for i, form in enumerate(self.packing.forms(product)):
                tensor = PackedTensor(dtype=str(form.dtype).removeprefix("torch."), shape=form.shape,
                                      offset=-(-end // LINE) * LINE)
                tensors[f"{product.name}.{i}"] = tensor
                end = tensor.offset + tensor.size
        sources = (self.tensors[parameter] for product in products for parameter in product.parameters)
        return Area(name=name, offset=offset, size=end, crc=_NO_CRC, tensors=tensors,
                    sources=tuple(SourceTensor(name=t.name, file=t.file.name, crc=_NO_CRC) for t in sources))


def make_copy(plan: CopyPlan, cache: Path) -> PackedCopy:
    """The copy that `plan` describes, in `cache`; what is missing of it is made.

    Raises:
        CheckpointError: a file is stale (with the reason), or a tensor of the source has changed on disk.
        OptionError: `cache` can't hold the copy (with the numbers).
    """
    wanted = plan.headers()
    folder = cache / plan.folder_name
    try:
        files = _find(wanted, folder)
        if files.keys() != wanted.keys():
            files = _complete(plan, wanted, folder)
    except OSError as error:
        raise OptionError(f"--model-cache={cache} can't hold the packed weights: {error.strerror or error}; name a "
                          "folder that can be written") from error
    return PackedCopy(folder=folder, layers=files, products=plan.by_area())


def _path(folder: Path, layer: int) -> Path:
    return folder / f"layer-{layer:05}{_ENDING}"


def _find(wanted: Mapping[int, PackedHeader], folder: Path) -> dict[int, PackedFile]:
    """Files that are there; those with a damaged header are not."""
    files = {}
    for layer, header in wanted.items():
        path = _path(folder, layer)
        try:
            found, begin = read_packed_header(path)
        except FileNotFoundError:
            continue
        except DamagedCopy as error:
            LOG.warning("%s; it is made again", error)
            continue
        found.check(header, path)
        files[layer] = PackedFile(path=path, header=found, begin=begin)
    return files


def _complete(plan: CopyPlan, wanted: Mapping[int, PackedHeader], folder: Path) -> dict[int, PackedFile]:
    """Make what is missing; under the lock, all temporary files are of processes that died."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock")):
        files = _find(wanted, folder)
        if files.keys() == wanted.keys():
            return files
        for left in folder.glob(".*.partial"):
            left.unlink()
        files = {layer: file for layer, file in files.items() if _is_sound(file)}
        missing = {layer: header for layer, header in wanted.items() if layer not in files}
        _check_room(missing.values(), folder)
        known = known_checksums(
            [path for ending in (_ENDING, _CONDEMNED) for path in folder.parent.glob(f"{plan.prefix}*/*{ending}")],
            plan.source)
        started = time.monotonic()
        for layer, header in missing.items():
            _make(plan, header, _path(folder, layer), known)
        LOG.info("packed the weights of %d layers into %s in %.1f s (%d were there)", len(missing), folder,
                 time.monotonic() - started, len(files))
        for condemned in folder.glob(f"*{_CONDEMNED}"):
            condemned.unlink()
        return _find(wanted, folder)


def _is_sound(file: PackedFile) -> bool:
    """Whether every area has its checksum; if not, the file is left to be made again, and named."""
    with file.path.open("rb") as stream:
        for area in file.header.areas:
            stream.seek(file.begin + area.offset)
            crc, left = 0, area.size
            while left:
                block = stream.read(min(_BLOCK, left))
                crc, left = zlib.crc32(block, crc), left - len(block) if block else 0
            if f"{crc:08x}" != area.crc:
                LOG.warning("%s: area %s is damaged (CRC-32 %08x, written %s); the file is made again", file.path,
                            area.name, crc, area.crc)
                return False
    return True


def _check_room(headers: Iterable[PackedHeader], folder: Path) -> None:
    needed = sum(len(encode(header)) + header.data_size for header in headers)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OptionError(f"the packed weights need {needed:,} more bytes, --model-cache={folder.parent} has {free:,} "
                          "bytes free; free some, or name a folder on a larger disk")


def _make(plan: CopyPlan, header: PackedHeader, path: Path, known: Mapping[str, str]) -> None:
    """Write one file, an area at a time, the header last."""
    begin, products = len(encode(header)), plan.by_area()
    partial = path.with_name(f".{path.name}-{uuid.uuid4().hex}.partial")
    try:
        with partial.open("xb") as stream:
            areas = []
            for area in header.areas:
                content, sources = _pack_area(plan, area, products[area.name], known)
                stream.seek(begin + area.offset)
                stream.write(content)
                areas.append(replace(area, crc=f"{zlib.crc32(memoryview(content)[:area.size]):08x}", sources=sources))
            stream.seek(0)
            stream.write(encode(replace(header, areas=tuple(areas))))
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
        _sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def _pack_area(plan: CopyPlan, area: Area, products: Iterable[Product],
               known: Mapping[str, str]) -> tuple[bytearray, tuple[SourceTensor, ...]]:
    """The area's bytes, whole pages, and what they are made from."""
    content = bytearray(pages(area.size))
    sources: tuple[SourceTensor, ...] = ()
    for product in products:
        facts = {parameter: plan.tensors[parameter] for parameter in product.parameters}
        sources += checked_sources(list(facts.values()), known)
        read = plan.read(facts)
        stored = plan.packing.store(product, [read[name] for name in product.parts],
                                    [read[name] for name in product.biases])
        for i, tensor in enumerate(stored):
            place = area.tensors[f"{product.name}.{i}"]
            assert (tensor.dtype, tuple(tensor.shape)) == (place.torch_dtype, place.shape), (product, i, tensor.shape)
            target = torch.frombuffer(content, dtype=place.torch_dtype, count=tensor.numel(), offset=place.offset)
            target.copy_(tensor.reshape(-1))
    return content, sources


def _sync_folder(folder: Path) -> None:
    """Make a rename outlast the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
