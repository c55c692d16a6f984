"""Checksums of a checkpoint's tensors, remembered from one conversion to the next.

safetensors files carry no checksums, so a byte that was wrong when it was first read can't be known.  What was read is
kept in the headers of the packed files made from it, those of every kernel set and dtype: a tensor that reads otherwise
later has changed on disk, and is named with its file.  Does not know kernels or layers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from batchgen_beam.errors import CheckpointError
from batchgen_beam.weights.headers import TensorFacts
from batchgen_beam.weights.packed_format import DamagedCopy, SourceTensor, read_packed_header

__all__ = ["checked_sources", "known_checksums"]

_BLOCK = 1 << 22


def known_checksums(files: Iterable[Path], source: str) -> dict[str, str]:
    """CRC-32 by tensor, as the headers of `files` remember them; files that can't be read, or are made from
    another source, say nothing."""
    known: dict[str, str] = {}
    for file in sorted(files):
        try:
            header, _ = read_packed_header(file)
        except (DamagedCopy, OSError):
            continue
        if header.source == source:
            known |= {tensor.name: tensor.crc for tensor in header.sources}
    return known


def checked_sources(tensors: Sequence[TensorFacts], known: Mapping[str, str]) -> tuple[SourceTensor, ...]:
    """Read each tensor's bytes once; a `CheckpointError` names a tensor that differs from what is known of it."""
    sources = tuple(SourceTensor(name=tensor.name, file=tensor.file.name, crc=_checksum(tensor)) for tensor in tensors)
    for tensor, source in zip(tensors, sources, strict=True):
        before = known.get(source.name, source.crc)
        if before != source.crc:
            raise CheckpointError(f"{tensor.file}: tensor {source.name} has changed on disk since it was first read "
                                  f"(CRC-32 {source.crc}, was {before}); fetch the file again")
    return sources


def _checksum(tensor: TensorFacts) -> str:
    crc, left = 0, tensor.end - tensor.start
    try:
        with tensor.file.open("rb") as file:
            file.seek(tensor.start)
            while left:
                block = file.read(min(_BLOCK, left))
                if not block:
                    raise CheckpointError(f"{tensor.file} ends within tensor {tensor.name}; fetch the file again")
                crc, left = zlib.crc32(block, crc), left - len(block)
    except OSError as error:
        raise CheckpointError(f"{tensor.file}: tensor {tensor.name} can't be read: {error.strerror or error}; fetch "
                              "the file again") from error
    return f"{crc:08x}"
