"""How a checkpoint stores its quantised weights, as far as bytes are concerned.

Owns which matrices a `quantization_config` leaves alone and what the others take on disk.  Does not know values: how
stored numbers become weights again is the loader's business.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum

from batchgen_beam.config.reading import JsonObject
from batchgen_beam.errors import CheckpointError

__all__ = ["Quantization", "StorageForm", "read_quantization"]

_SCALE = 4
"""Bytes of a float32 scale."""

_MX_GROUP = 32
"""Weights that share one scale of one byte in the MX formats (OCP Microscaling v1.0, section 5)."""

_NEVER = ("embed_tokens", "lm_head")
_MXFP4_NEVER = ("self_attn", "router", *_NEVER)
_OUTER = "language_model."


class StorageForm(StrEnum):
    """The forms whose size is known."""

    FP8_BLOCKS = "fp8 blocks"
    FP8_TENSOR = "fp8"
    FP8_ROWS = "fp8 rows"
    MXFP4 = "mxfp4"
    INT4_GROUPS = "int4 groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """A `quantization_config`.  `form` None: a method whose storage is not known here.

    `block` is (outputs, inputs) of weights with one scale; `kept` are names that stay in the model's dtype: whole
    components of a module's path, `*` for any one, or after `re:` a pattern that begins the path.
    """

    method: str
    form: StorageForm | None
    block: tuple[int, int] = (128, 128)
    kept: tuple[str, ...] = field(default=())

    def keeps(self, module: str) -> bool:
        """Whether a module's weight is stored as it is."""
        own = (*self.kept, *(_MXFP4_NEVER if self.form is StorageForm.MXFP4 else _NEVER))
        return any(_matches(name, module) for name in own)

    def matrix_bytes(self, outputs: int, inputs: int) -> int:
        """Stored bytes of a quantised weight [outputs, inputs], its scales included.

        Raises `CheckpointError` for a method whose form is not known.
        """
        rows, columns = self.block
        match self.form:
            case StorageForm.FP8_BLOCKS:
                return outputs * inputs + _SCALE * -(-outputs // rows) * -(-inputs // columns)
            case StorageForm.FP8_TENSOR:
                return outputs * inputs + _SCALE
            case StorageForm.FP8_ROWS:
                return outputs * (inputs + 2)
            case StorageForm.MXFP4:
                return outputs * (-(-inputs // 2) + -(-inputs // _MX_GROUP))
            case StorageForm.INT4_GROUPS:
                return outputs * (4 * -(-inputs // 8) + 2 * -(-inputs // columns)) + 16
        raise CheckpointError(f"it is not known how much {self.method!r} weights take")


def read_quantization(source: JsonObject) -> Quantization | None:
    """What config.json says about quantised storage; None for plain weights."""
    found = source.child("quantization_config") or source.child("compression_config")
    if found is None or not found.values:
        return None
    method = str(found.values.get("quant_method") or "unnamed method")
    if method == "fp8":
        return _read_fp8(found)
    if method == "mxfp4":
        return Quantization(method=method, form=StorageForm.MXFP4, kept=_names(found, "modules_to_not_convert"))
    if method == "compressed-tensors":
        return _read_compressed(found)
    return Quantization(method=method, form=None)


def _read_fp8(found: JsonObject) -> Quantization:
    block = found.read("weight_block_size", tuple[int, ...]) or ()
    if block and (len(block) != 2 or min(block) < 1):
        raise found.error(f"weight_block_size must be two sizes, got {list(block)}")
    return Quantization(method="fp8", form=StorageForm.FP8_BLOCKS if block else StorageForm.FP8_TENSOR,
                        block=(block[0], block[1]) if block else (1, 1), kept=_names(found, "modules_to_not_convert"))


def _read_compressed(found: JsonObject) -> Quantization:
    """compressed-tensors: one group of settings for all weights that are not ignored."""
    groups = found.child("config_groups")
    first = None if groups is None or not groups.values else groups.child(next(iter(groups.values)))
    weights = None if first is None else first.child("weights")
    bits = None if weights is None else weights.read("num_bits", int)
    size = (None if weights is None else weights.read("group_size", int)) or _MX_GROUP
    forms = {("pack-quantized", 4): StorageForm.INT4_GROUPS, ("mxfp4-pack-quantized", 4): StorageForm.MXFP4,
             ("float-quantized", 8): StorageForm.FP8_ROWS}
    packing = found.read("format", str) or ""
    return Quantization(method=f"compressed-tensors {packing}".strip(), form=forms.get((packing, bits or 0)),
                        block=(1, size), kept=_names(found, "ignore"))


def _names(found: JsonObject, key: str) -> tuple[str, ...]:
    return tuple(found.read(key, tuple[str, ...]) or ())


def _matches(name: str, module: str) -> bool:
    if name.startswith("re:"):
        return re.match(name[3:], module) is not None or re.match(name[3:], _OUTER + module) is not None
    parts = r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in name.removeprefix(_OUTER).split("."))
    return re.search(rf"(^|\.){parts}(\.|$)", module) is not None
