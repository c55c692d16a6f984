"""A model's products as packed files on this machine: made once, found by what they are made from and for.

Owns the folder (`packed-<source>-<packing>-v<version>` in the model cache) and the making of what is missing in it:
under a file lock, each file under a temporary name, synced and renamed, so that a file of its own name is whole.  A
conversion that was killed goes on with the files that are missing, after those that are there were read again.
Guarantees: every area's bytes are those that were written (CRC-32); which bytes a checkpoint had is remembered
(`source_tensors`), whether they were right is not known.  Does not know architectures or kernels.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
import zlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from batchgen_beam.errors import OptionError
from batchgen_beam.weights.copy_plan import CopyPlan
from batchgen_beam.weights.file_lock import locked
from batchgen_beam.weights.freed_memory import return_freed
from batchgen_beam.weights.loader import TensorReader
from batchgen_beam.weights.packed_format import Area, DamagedCopy, PackedHeader, encode, pages, read_packed_header
from batchgen_beam.weights.packing import Product
from batchgen_beam.weights.source_tensors import checked_sources, known_checksums

__all__ = ["PackedCopy", "PackedFile", "make_copy"]

LOG = logging.getLogger(__name__)

_ENDING = ".packed"
_CONDEMNED = ".damaged"
_BLOCK = 1 << 22


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
            with suppress(FileNotFoundError):  # another process may have found it too
                self.path.replace(self.path.with_suffix(_CONDEMNED))
            raise DamagedCopy(f"{self.path}: area {area.name} is damaged (CRC-32 {crc}, written {area.crc}); run "
                              "again, and the file is made anew from the model")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedCopy:
    """A complete copy: a file for each layer that has products, and the products by area."""

    layers: Mapping[int, PackedFile]
    products: Mapping[str, tuple[Product, ...]]


def make_copy(plan: CopyPlan, cache: Path) -> PackedCopy:
    """The copy that `plan` describes, in `cache`; what is missing, damaged or stale is made, and named.

    Raises:
        CheckpointError: a tensor of the source has changed on disk.
        OptionError: `cache` can't hold the copy (with the numbers).
    """
    wanted = plan.headers()
    folder = cache.expanduser().absolute() / plan.folder_name
    try:
        files = _find(wanted, folder, thoroughly=False)
        if files.keys() != wanted.keys():
            files = _complete(plan, wanted, folder)
    except OSError as error:
        raise OptionError(f"--model-cache={cache} can't hold the packed weights: {error.strerror or error}; name a "
                          "folder that can be written") from error
    return PackedCopy(layers=files, products=plan.by_area())


def _path(folder: Path, layer: int) -> Path:
    return folder / f"layer-{layer:05}{_ENDING}"


def _find(wanted: Mapping[int, PackedHeader], folder: Path, *, thoroughly: bool) -> dict[int, PackedFile]:
    """Files that are there, going by their headers; thoroughly: by every byte, and unfit ones are named."""
    files = {}
    for layer, header in wanted.items():
        path = _path(folder, layer)
        try:
            found, begin = read_packed_header(path)
            found.check(header, path)
        except FileNotFoundError:
            continue
        except DamagedCopy as error:
            if thoroughly:
                LOG.warning("%s; it is made again", error)
            continue
        file = PackedFile(path=path, header=found, begin=begin)
        if not thoroughly or _is_sound(file):
            files[layer] = file
    return files


def _complete(plan: CopyPlan, wanted: Mapping[int, PackedHeader], folder: Path) -> dict[int, PackedFile]:
    """Make what is missing; under the lock, all temporary files are of processes that died."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f"{folder.name}.lock")):
        files = _find(wanted, folder, thoroughly=True)
        for left in folder.glob(".*.partial"):
            left.unlink()
        missing = {layer: header for layer, header in wanted.items() if layer not in files}
        _check_room(missing.values(), folder)
        known = known_checksums((path for ending in (_ENDING, _CONDEMNED)
                                 for path in folder.parent.glob(f"{plan.prefix}*/*{ending}")), plan.source)
        started = time.monotonic()
        for layer, header in missing.items():
            files[layer] = _make(plan, header, _path(folder, layer), known)
            LOG.info("packed the weights of layer %d, %d of %d", layer, len(files), len(wanted))
        for condemned in folder.glob(f"*{_CONDEMNED}"):
            condemned.unlink()
        LOG.info("packed the weights of %d layers into %s in %.1f s", len(missing), folder, time.monotonic() - started)
        _name_others(folder)
        return dict(sorted(files.items()))


def _name_others(folder: Path) -> None:
    """Say what other copies take; whether anyone needs them is not known here."""
    others = sorted(path for path in folder.parent.glob("packed-*") if path.is_dir() and path != folder)
    if others:
        size = sum(file.stat().st_size for other in others for file in other.glob(f"*{_ENDING}"))
        LOG.info("packed weights of other models, dtypes or kernels beside them take %s bytes: %s; delete those that "
                 "no run needs", f"{size:,}", ", ".join(str(other) for other in others))


def _is_sound(file: PackedFile) -> bool:
    """Whether every area has its checksum; if not, the file is left to be made again, and named."""
    with file.path.open("rb") as stream:
        for area in file.header.areas:
            stream.seek(file.begin + area.offset)
            crc, left = 0, area.size
            while left:
                block = stream.read(min(_BLOCK, left))
                if not block:  # it was cut while it is read
                    break
                crc, left = zlib.crc32(block, crc), left - len(block)
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


def _make(plan: CopyPlan, header: PackedHeader, path: Path, known: Mapping[str, str]) -> PackedFile:
    """Write one file, a product at a time, the header last."""
    begin, products = len(encode(header)), plan.by_area()
    sources = checked_sources(
        plan.sources(product for area in header.areas for product in products[area.name]), known)
    partial = path.with_name(f".{path.name}-{uuid.uuid4().hex}.partial")
    try:
        with partial.open("xb") as stream:
            areas = []
            for area in header.areas:
                stream.seek(begin + area.offset)
                areas.append(replace(area, crc=_write_area(plan, area, products[area.name], stream)))
            header = replace(header, areas=tuple(areas), sources=sources)
            stream.seek(0)
            stream.write(encode(header))
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
        _sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)
    return PackedFile(path=path, header=header, begin=begin)


def _write_area(plan: CopyPlan, area: Area, products: Iterable[Product], stream: BinaryIO) -> str:
    """Write the area, whole pages, a product at a time: there is never more of it in memory.  The CRC-32 of its bytes,
    those between tensors included."""
    crc = end = 0
    for product in products:
        crc, end = _write_product(plan, area, product, stream, crc, end)
        return_freed()
    stream.write(bytes(pages(area.size) - area.size))
    return f"{crc:08x}"


def _write_product(plan: CopyPlan, area: Area, product: Product, stream: BinaryIO, crc: int,
                   end: int) -> tuple[int, int]:
    """Write a product's tensors after the area's first `end` bytes, which have the checksum `crc`; both afterwards."""
    for i, tensor in enumerate(_stored(plan, product)):
        place = area.tensors[f"{product.name}.{i}"]
        assert (tensor.dtype, tuple(tensor.shape)) == (place.torch_dtype, place.shape), (product, i, tensor.shape)
        for part in (bytes(place.offset - end), tensor.reshape(-1).view(torch.uint8).numpy().data):
            stream.write(part)
            crc = zlib.crc32(part, crc)
        end = place.offset + place.size
    return crc, end


def _stored(plan: CopyPlan, product: Product) -> tuple[Tensor, ...]:
    """The product in the form that is stored; of its source nothing stays in memory, mapped pages neither."""
    tensors = {name: plan.tensors[name] for name in product.parameters}
    with TensorReader(tensors, plan.parameters, plan.dtype, torch.device("cpu")) as reader:
        weights = [reader.get(name) for name in product.parts]
        biases = [reader.get(name) for name in product.biases]
    return plan.packing.store(product, weights, biases)


def _sync_folder(folder: Path) -> None:
    """Make a rename outlast the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
