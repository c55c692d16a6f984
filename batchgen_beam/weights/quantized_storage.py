"""Which stored tensors make up one quantised weight, and whether they fit it: names and headers alone.

Owns the strict matching both ways: no packed weight without its scale, no scale without its weight, none that
config.json calls plain; and the shape that each part must have.  Does not know values, models or torch.

Shape letters: O output rows, I input columns, E experts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from batchgen_beam.config.quantization import MX_GROUP, Quantization, Storage
from batchgen_beam.errors import CheckpointError
from batchgen_beam.weights.headers import TensorFacts

__all__ = ["PLAIN_DTYPES", "QuantizedTensor", "StoredTensor", "check_parts", "gather_quantized"]

PLAIN_DTYPES = ("F32", "BF16", "F16")
_EXPONENTS = ("U8", "F8_E8M0")
_INT4_A_WORD = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedTensor:
    """A weight in several stored tensors.  `name` is the one that it has in an unquantised checkpoint.

    `weight` holds the numbers.  Only INT4 has `zero_point` (where it is not symmetric) and `size` (its true shape).
    """

    name: str
    quantization: Quantization
    weight: TensorFacts
    scale: TensorFacts
    zero_point: TensorFacts | None = None
    size: TensorFacts | None = None

    @property
    def parts(self) -> tuple[TensorFacts, ...]:
        """All tensors that are stored for it."""
        return tuple(part for part in (self.weight, self.scale, self.zero_point, self.size) if part is not None)

    @property
    def file(self) -> Path:
        """The file that holds its numbers."""
        return self.weight.file


StoredTensor = TensorFacts | QuantizedTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What a storage appends to a weight's plain name, and the number formats of weight and scale."""

    weight: str
    scales: tuple[str, ...]
    dtype: str
    scale_dtypes: tuple[str, ...]


_FORMS = {
    Storage.FP8: _Form(weight="", scales=("_scale_inv", "_scale"), dtype="F8_E4M3",
                       scale_dtypes=PLAIN_DTYPES + _EXPONENTS),
    Storage.INT4: _Form(weight="_packed", scales=("_scale",), dtype="I32", scale_dtypes=PLAIN_DTYPES),
    Storage.MXFP4: _Form(weight="_packed", scales=("_scale",), dtype="U8", scale_dtypes=_EXPONENTS),
    Storage.MXFP4_EXPERTS: _Form(weight="_blocks", scales=("_scales",), dtype="U8", scale_dtypes=_EXPONENTS),
}
_ZERO_POINT, _SIZE = "_zero_point", "_shape"
_ACTIVATION_SCALES = (".input_scale", ".activation_scale")
_PART = re.compile(r"(?P<weight>.*\.weight)_(scale|scale_inv|packed|zero_point|shape|g_idx|global_scale)"
                   r"|(?P<experts>.*_proj)_(blocks|scales)|(?P<module>.*)\.(input|activation)_scale")


def gather_quantized(stored: Mapping[str, TensorFacts],
                     quantization: Quantization) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """Stored tensors by the names of an unquantised checkpoint, and the names of what needn't be read.

    The latter are scales of activations, which are not quantised here.  Raises `CheckpointError` with the name of a
    weight without its scale, of a part without its weight, or of a weight that config.json calls plain.
    """
    form = _FORMS[quantization.storage]
    left, found = dict(stored), dict[str, StoredTensor]()
    for name, tensor in stored.items():
        if tensor.dtype == form.dtype if form.weight == "" else name.endswith(form.weight):
            weight = _gather_one(name.removesuffix(form.weight), left, quantization)
            found[weight.name] = weight
    modules = {name.removesuffix(".weight") for name in found} if quantization.has_activation_scales else set[str]()
    unread = [name for module in modules for end in _ACTIVATION_SCALES if (name := module + end) in left]
    for name in unread:
        del left[name]
    _check_rest(left, found)
    return found | left, tuple(sorted(unread))


def _gather_one(name: str, left: dict[str, TensorFacts], quantization: Quantization) -> QuantizedTensor:
    """The weight of the plain `name`; its parts are taken out of `left`."""
    form = _FORMS[quantization.storage]
    weight = left.pop(name + form.weight)
    scales = [name + end for end in form.scales if name + end in left]
    if len(scales) != 1:
        wanted = " or ".join(name + end for end in form.scales)
        fault = f"has two scales ({', '.join(scales)})" if scales else f"its scale {wanted} is absent"
        raise CheckpointError(f"{weight.name} in {weight.file} is quantised ({weight.dtype}) and {fault}")
    entry = quantization.plain_modules.entry_of(name.removesuffix(".weight"))
    if entry is not None:
        raise CheckpointError(f"{weight.name} in {weight.file} is stored quantised ({weight.dtype}), but config.json "
                              f"lists {entry!r} among the modules that are not; correct the list or the file")
    scale = left.pop(scales[0])
    if quantization.storage is not Storage.INT4:
        return QuantizedTensor(name=name, quantization=quantization, weight=weight, scale=scale)
    return QuantizedTensor(
        name=name, quantization=quantization, weight=weight, scale=scale, size=_take(name + _SIZE, left, weight),
        zero_point=None if quantization.is_symmetric else _take(name + _ZERO_POINT, left, weight))


def _take(name: str, left: dict[str, TensorFacts], weight: TensorFacts) -> TensorFacts:
    if name not in left:
        raise CheckpointError(f"{weight.name} in {weight.file} is quantised ({weight.dtype}) and its {name} is absent")
    return left.pop(name)


def _check_rest(left: Mapping[str, TensorFacts], found: Mapping[str, StoredTensor]) -> None:
    """What is no part of a quantised weight is plain, and names no weight that it would be a part of."""
    for name, tensor in left.items():
        if name in found:
            parts = ", ".join(part.name for part in found[name].parts)
            raise CheckpointError(f"{name} in {tensor.file} is stored plain, and quantised too as {parts}")
        match = _PART.fullmatch(name)
        if match is not None:
            owner = next(group for group in match.groups() if group is not None)
            fault = ("is stored plain" if owner in left else
                     "has no such part by config.json" if owner in found else "is not stored")
            raise CheckpointError(f"{name} in {tensor.file} is part of a quantised {owner}, which {fault}")
        if tensor.dtype not in PLAIN_DTYPES:
            raise CheckpointError(f"{name} in {tensor.file} is stored as {tensor.dtype}, which is neither plain "
                                  f"({', '.join(PLAIN_DTYPES)}) nor how config.json says that weights are quantised")


def check_parts(tensor: QuantizedTensor, shape: tuple[int, ...]) -> None:
    """Refuse parts whose shape or number format does not give a weight of `shape`, by name; reads headers only."""
    form, zero_points = _FORMS[tensor.quantization.storage], (-(-shape[0] // _INT4_A_WORD), *tensor.scale.shape[1:])
    weight_shape, scale_shapes = _wanted_shapes(tensor, shape)
    for part, shapes, dtypes in ((tensor.weight, (weight_shape,), (form.dtype,)),
                                 (tensor.scale, scale_shapes, form.scale_dtypes),
                                 (tensor.zero_point, (zero_points,), ("I32",)), (tensor.size, ((2,),), ("I64", "I32"))):
        if part is not None and (part.shape not in shapes or part.dtype not in dtypes):
            raise CheckpointError(
                f"{part.name} in {part.file} is {part.dtype} {list(part.shape)}; to give {tensor.name} the shape "
                f"{list(shape)} that config.json asks for, it has to be {' or '.join(dtypes)} {list(shapes[0])}")


def _wanted_shapes(tensor: QuantizedTensor,
                   shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The shape of the numbers, and those that the scales may have, for a weight of `shape`."""
    storage, block = tensor.quantization.storage, tensor.quantization.block
    if len(shape) != (3 if storage is Storage.MXFP4_EXPERTS else 2):
        raise CheckpointError(f"{tensor.weight.name} in {tensor.file} is quantised, but {tensor.name} has the shape "
                              f"{list(shape)} by config.json, for which {tensor.quantization.method} has no form")
    *experts, outputs, inputs = shape if storage is not Storage.MXFP4_EXPERTS else (shape[0], shape[2], shape[1])
    if storage in (Storage.MXFP4, Storage.MXFP4_EXPERTS) and inputs % MX_GROUP:
        raise CheckpointError(f"{tensor.weight.name} in {tensor.file}: {tensor.name} has {inputs} inputs by "
                              f"config.json, and {tensor.quantization.method} needs a multiple of {MX_GROUP}")
    rows, columns = (1 if each is None else -(-size // each)
                     for size, each in zip((outputs, inputs), block, strict=True))
    grids = [(*experts, rows, columns)] + [(rows,)] * (block[1] is None) + [()] * (block == (None, None))
    match storage:
        case Storage.FP8:
            return shape, tuple(grids)
        case Storage.INT4:
            return (outputs, -(-inputs // _INT4_A_WORD)), tuple(grids)
        case Storage.MXFP4:
            return (outputs, inputs // 2), tuple(grids)
        case Storage.MXFP4_EXPERTS:
            return (*experts, outputs, columns, MX_GROUP // 2), tuple(grids)
