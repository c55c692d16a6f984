"""How a checkpoint's weights are quantised, as its config.json says.

Owns the methods and formats that can be read, the refusal of all others by name, and the lists of what stays plain.
Does not know tensors, files or torch.  Facts: transformers' `FineGrainedFP8Config` and `Mxfp4Config`, and
compressed-tensors' `QuantizationConfig` (https://github.com/vllm-project/compressed-tensors).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from batchgen_beam.config.reading import JsonObject
from batchgen_beam.errors import CheckpointError

__all__ = ["MX_GROUP", "PlainModules", "Quantization", "Storage", "read_quantization"]

MX_GROUP = 32
"""Columns that share one scale of an MX format (OCP Microscaling Formats 1.0, section 5.3)."""

_REMEDY = ("use the model's unquantised checkpoint, or one of method fp8, mxfp4 or compressed-tensors "
           "(float-quantized, pack-quantized, mxfp4-pack-quantized)")
_REGEX = "re:"


class Storage(Enum):
    """How the numbers of a quantised weight lie in the file."""

    FP8 = "FP8"
    INT4 = "INT4"
    MXFP4 = "MXFP4"
    MXFP4_EXPERTS = "MXFP4 experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainModules:
    """The modules whose weights are not quantised, by the file's list: names, and patterns from a name's beginning.

    A name means the module itself, all below it, and any module that ends so; whole parts of a name only.
    """

    names: frozenset[str] = frozenset()
    patterns: tuple[re.Pattern[str], ...] = ()

    def entry_of(self, module: str) -> str | None:
        """The entry that names `module`; None if there is none."""
        parts = module.split(".")
        ends = {".".join(cut) for n in range(len(parts)) for cut in (parts[:n + 1], parts[n:])}
        named = min(self.names & ends, default=None)
        return named or next((pattern.pattern for pattern in self.patterns if pattern.match(module)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """How quantised weights are stored.  `method` is the file's own word for it.

    `block` is the number of rows and of columns that share a scale, None where all of them do.
    """

    method: str
    storage: Storage
    block: tuple[int | None, int | None]
    is_symmetric: bool = True
    has_activation_scales: bool = False
    plain_modules: PlainModules = PlainModules()


def read_quantization(source: JsonObject, default: None) -> Quantization | None:
    """What `quantization_config` (or `compression_config`, as it was once called) says; None for plain weights.

    Raises `CheckpointError` with the method's or format's name for any that can't be read.
    """
    found = source.child("quantization_config") or source.child("compression_config")
    if found is None or not found.values:
        return None
    method = found.read("quant_method", str)
    reader = _READERS.get(method)
    if reader is None:
        raise _refusal(found, repr(method or "unnamed method"))
    return reader(found)


def _refusal(source: JsonObject, what: str) -> CheckpointError:
    return source.error(f"the model is quantised by {what}, which can't be read; {_REMEDY}")


def _read_fp8(source: JsonObject) -> Quantization:
    if source.values.get("fmt") not in (None, "e4m3"):
        raise _refusal(source, f"'fp8' of fmt {source.values['fmt']!r}")
    block: tuple[int, ...] | None = source.read("weight_block_size", tuple[int, ...])
    return Quantization(
        method="fp8", storage=Storage.FP8, block=(None, None) if block is None else _pair(source, "weight_block_size"),
        has_activation_scales=source.read("activation_scheme", str) == "static",
        plain_modules=_plain_modules(source, "modules_to_not_convert"))


def _read_mxfp4(source: JsonObject) -> Quantization:
    return Quantization(method="mxfp4", storage=Storage.MXFP4_EXPERTS, block=(1, MX_GROUP),
                        plain_modules=_plain_modules(source, "modules_to_not_convert"))


def _read_compressed_tensors(source: JsonObject) -> Quantization:
    form = source.read("format", str)
    method = f"compressed-tensors {form}"
    weights, has_activation_scales = _weight_arguments(source, form)
    kind = (form, weights.read("type", str) or "int", weights.read("num_bits", int, 1) or 8)
    storage = _COMPRESSED.get(kind)
    if storage is None:
        raise _refusal(source, f"'compressed-tensors' in format {form!r} with {kind[2]}-bit {kind[1]} weights")
    is_symmetric = weights.values.get("symmetric") is not False
    if not is_symmetric and storage is not Storage.INT4:
        raise weights.error(f"symmetric false has no meaning for {method}")
    if weights.values.get("actorder") in ("group", "dynamic", True):
        raise _refusal(weights, f"{method!r} with activation order {weights.values['actorder']!r}")
    return Quantization(
        method=method, storage=storage, block=_compressed_block(weights, storage, method), is_symmetric=is_symmetric,
        has_activation_scales=has_activation_scales, plain_modules=_plain_modules(source, "ignore"))


_READERS: dict[str | None, Callable[[JsonObject], Quantization]] = {
    "fp8": _read_fp8, "mxfp4": _read_mxfp4, "compressed-tensors": _read_compressed_tensors}
_COMPRESSED = {
    ("float-quantized", "float", 8): Storage.FP8,
    ("pack-quantized", "int", 4): Storage.INT4,
    ("mxfp4-pack-quantized", "float", 4): Storage.MXFP4,
}


def _weight_arguments(source: JsonObject, form: str | None) -> tuple[JsonObject, bool]:
    """The one description of quantised weights, and whether scales of activations are stored beside them."""
    if _said(source, "sparsity_config", "format") not in (None, "dense") or source.values.get("transform_config"):
        raise _refusal(source, "'compressed-tensors' with sparse or transformed weights")
    groups = source.child("config_groups")
    schemes = [scheme for name in groups.values if (scheme := groups.child(name))] if groups else []
    found = [weights for scheme in schemes if (weights := scheme.child("weights"))]
    if not found or len(found) != len(schemes):
        raise source.error("config_groups must say for each group how its weights are quantised")
    stored = [{key: weights.values.get(key) for key in _STORED} for weights in found]
    if any(one != stored[0] for one in stored) or any(s.values.get("format") not in (None, form) for s in schemes):
        raise _refusal(source, "'compressed-tensors' in several ways at once (its config_groups differ)")
    return found[0], any(_said(scheme, "input_activations", "dynamic") is False for scheme in schemes)


_STORED = ("num_bits", "type", "strategy", "group_size", "block_structure", "symmetric", "actorder")


def _said(source: JsonObject, key: str, inner: str) -> object:
    child = source.child(key)
    return None if child is None else child.values.get(inner)


def _compressed_block(weights: JsonObject, storage: Storage, method: str) -> tuple[int | None, int | None]:
    strategy = weights.read("strategy", str)
    match storage, strategy:
        case Storage.FP8, "tensor":
            return None, None
        case Storage.FP8 | Storage.INT4, "channel":
            return 1, None
        case Storage.FP8, "block":
            return _pair(weights, "block_structure")
        case Storage.INT4 | Storage.MXFP4, "group":
            size = weights.read("group_size", int, 1)
            if size is not None and (storage is Storage.INT4 or size == MX_GROUP):
                return 1, size
            raise weights.error(f"group_size {size} has no meaning for {method}")
    raise _refusal(weights, f"{method!r} by strategy {strategy!r}")


def _pair(source: JsonObject, key: str) -> tuple[int, int]:
    sizes: tuple[int, ...] = source.read(key, tuple[int, ...]) or ()
    if len(sizes) != 2 or min(sizes) < 1:
        raise source.error(f"{key} must hold two sizes of at least 1, got {source.values.get(key)!r}")
    return sizes[0], sizes[1]


def _plain_modules(source: JsonObject, key: str) -> PlainModules:
    """`re:` marks a pattern, as in compressed-tensors; a `*` makes one that ends with a part, as in transformers."""
    entries: tuple[str, ...] = source.read(key, tuple[str, ...]) or ()
    texts = [entry.removeprefix(_REGEX) if entry.startswith(_REGEX) else rf"(?:{entry})(?:\.|$)"
             for entry in entries if entry.startswith(_REGEX) or "*" in entry]
    names = frozenset(entry for entry in entries if not entry.startswith(_REGEX) and "*" not in entry)
    try:
        return PlainModules(names=names, patterns=tuple(re.compile(text) for text in texts))
    except re.error as error:
        raise source.error(f"{key}: {error.pattern!r} is no pattern ({error})") from None
