"""What a checkpoint's weights are, as one digest: names, sizes, headers and sampled blocks; never path or time.

Owns the sampling: files of up to 8 MiB are read whole; of larger ones the header, the first bytes of every tensor and
evenly spread blocks, so that the cost per file does not grow with its size.  Does not know models or torch.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO

from batchgen_beam.config.model_registry import load_config
from batchgen_beam.weights.headers import read_header
from batchgen_beam.weights.name_tables import expected_parameters
from batchgen_beam.weights.shards import find_shards

__all__ = ["weights_identity"]

_BLOCK = 1 << 16
_BLOCKS = 128
_TENSOR_HEAD = 512


def weights_identity(folder: Path) -> str:
    """SHA-256, 64 hex digits, of the weight files in `folder`; of none if it holds a model without weights."""
    digest = hashlib.sha256()
    for file in find_shards(folder) if expected_parameters(load_config(str(folder))) else ():
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as stream:
            _add_samples(digest, stream, _sample_offsets(file, size))
    return digest.hexdigest()


def _sample_offsets(file: Path, size: int) -> list[tuple[int, int]]:
    """(offset, bytes) of what is hashed, in order of the file."""
    if size <= _BLOCK * _BLOCKS:
        return [(0, size)]
    tensors = read_header(file).values()
    header_end = min((tensor.start for tensor in tensors), default=size)
    heads = [(tensor.start, min(_TENSOR_HEAD, tensor.end - tensor.start)) for tensor in tensors]
    spread = [((size - _BLOCK) * n // (_BLOCKS - 1), _BLOCK) for n in range(_BLOCKS)]
    return [(0, header_end), *sorted(heads + spread)]


def _add_samples(digest: hashlib._Hash, stream: BinaryIO, samples: list[tuple[int, int]]) -> None:
    for offset, count in samples:
        stream.seek(offset)
        digest.update(stream.read(count))
