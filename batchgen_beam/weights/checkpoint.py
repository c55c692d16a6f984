"""Whether a folder is a checkpoint that can be run, decided from names, headers and config.json alone.

Owns the refusals: each names the thing and the remedy.  Loads no tensor; only the bytes of a stored output projection
beside tied embeddings are compared, and the sizes read that INT4 weights have beside them.  Does not know torch,
kernels or Beam.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from batchgen_beam.config.base import ModelConfig
from batchgen_beam.config.model_registry import load_config, require_supported
from batchgen_beam.errors import CheckpointError
from batchgen_beam.weights.headers import TensorFacts
from batchgen_beam.weights.name_tables import EMBEDDING, HEAD, Parameter, expected_parameters, match_names
from batchgen_beam.weights.quantized_storage import (
    PLAIN_DTYPES,
    QuantizedTensor,
    StoredTensor,
    check_parts,
    gather_quantized,
)
from batchgen_beam.weights.shards import read_tensors
from batchgen_beam.weights.text_part import text_part

__all__ = ["CheckpointFacts", "check_checkpoint"]

_SCALES = ("_scale", "_scale_inv", "_scales")
_COMPARE_BYTES = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """A checkpoint that passed.  `tensors` maps names of `parameters`, in order of the type's
    table, to what fills them, which one tensor may do for several; `ignored` tensors are stored and never read."""

    folder: Path
    config: ModelConfig
    tensors: Mapping[str, StoredTensor]
    parameters: Mapping[str, Parameter]
    ignored: tuple[str, ...]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all parameters as stored."""
        parts = {part.name: part for tensor in self.tensors.values() for part in tensor.parts}
        return sum(part.end - part.start for part in parts.values())

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The stored number formats, sorted."""
        return tuple(sorted({part.dtype for tensor in self.tensors.values() for part in tensor.parts}))


def check_checkpoint(folder: Path) -> CheckpointFacts:
    """The facts of a complete, consistent and supported checkpoint; any fault is a `CheckpointError` by name."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is no folder; a model is a folder with config.json and safetensors")
    config = load_config(str(folder))
    require_supported(config)
    if not expected_parameters(config):
        return CheckpointFacts(folder=folder, config=config, tensors={}, parameters={}, ignored=())
    language, other_parts = text_part(config, read_tensors(folder), folder)
    stored, unread = _gather(language, config)
    parameters = expected_parameters(config, stored)
    ignored = match_names(config, parameters, stored, folder)
    _check_shapes(parameters, stored)
    if HEAD in ignored:
        _check_tied_head(stored[EMBEDDING], stored[HEAD])
    tensors = {parameter.name: stored[parameter.stored] for parameter in parameters}
    return CheckpointFacts(folder=folder, config=config, tensors=tensors,
                           ignored=tuple(sorted(ignored + unread + other_parts)),
                           parameters={parameter.name: parameter for parameter in parameters})


def _gather(stored: Mapping[str, TensorFacts],
            config: ModelConfig) -> tuple[Mapping[str, StoredTensor], tuple[str, ...]]:
    """What is stored, by the names of an unquantised checkpoint, and what of it needn't be read."""
    if config.quantization is not None:
        return gather_quantized(stored, config.quantization)
    _check_dtypes(stored)
    return stored, ()


def _check_dtypes(stored: Mapping[str, TensorFacts]) -> None:
    for name, tensor in stored.items():
        if tensor.dtype not in PLAIN_DTYPES:
            scales = [name + end for end in _SCALES if name + end in stored]
            partner = f"with its scale {scales[0]}" if scales else "without any scale"
            raise CheckpointError(f"{name} in {tensor.file} is stored as {tensor.dtype} {partner}, and config.json "
                                  f"names no quantization method; plain weights are {', '.join(PLAIN_DTYPES)}")


def _check_shapes(parameters: Iterable[Parameter], stored: Mapping[str, StoredTensor]) -> None:
    for name, shape in {p.stored: p.stored_shape or p.shape for p in parameters}.items():
        tensor = stored[name]
        if isinstance(tensor, QuantizedTensor):
            check_parts(tensor, shape)
            _check_size(tensor, shape)
        elif tensor.shape != shape:
            raise CheckpointError(f"{tensor.name} in {tensor.file} has shape {list(tensor.shape)}, config.json asks "
                                  f"for {list(shape)}")


def _check_size(tensor: QuantizedTensor, shape: tuple[int, ...]) -> None:
    """The size stored beside an INT4 weight, whose words tell it only to the next multiple of eight."""
    size = tensor.size
    if size is None:
        return
    with size.file.open("rb") as file:
        file.seek(size.start)
        found = struct.unpack("<2q" if size.dtype == "I64" else "<2i", file.read(size.end - size.start))
    if found != shape:
        raise CheckpointError(f"{size.name} in {size.file} says {list(found)}, config.json asks for {list(shape)}")


def _check_tied_head(embedding: StoredTensor, head: StoredTensor) -> None:
    parts = zip(embedding.parts, head.parts, strict=False)
    if len(embedding.parts) != len(head.parts) or not all(_same_bytes(one, other) for one, other in parts):
        raise CheckpointError(f"{HEAD} in {head.file} differs from {EMBEDDING} although config.json has "
                              "tie_word_embeddings true; set it to false if the stored projection is meant")


def _same_bytes(one: TensorFacts, other: TensorFacts) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    with one.file.open("rb") as left, other.file.open("rb") as right:
        left.seek(one.start)
        right.seek(other.start)
        for offset in range(0, one.end - one.start, _COMPARE_BYTES):
            count = min(_COMPARE_BYTES, one.end - one.start - offset)
            if left.read(count) != right.read(count):
                return False
    return True
