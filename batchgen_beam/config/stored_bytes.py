"""What quantised weights take on disk, their scales included.

Owns the arithmetic of each storage, and which matrices are left plain.  Does not know values: how stored numbers become
weights again is the loader's business.
"""

from __future__ import annotations

from batchgen_beam.config.quantization import MX_GROUP, Quantization, Storage

__all__ = ["is_plain", "matrix_bytes"]

_FLOAT32 = 4
_BFLOAT16 = 2
_SHAPE = 16
"""Bytes of the two sizes that are stored beside a packed weight."""


def is_plain(stored: Quantization, module: str) -> bool:
    """Whether a module's weight is stored in the model's dtype."""
    if stored.storage is Storage.MXFP4_EXPERTS and ".experts." not in f".{module}.":
        return True
    return stored.plain_modules.entry_of(module) is not None


def matrix_bytes(stored: Quantization, outputs: int, inputs: int) -> int:
    """Stored bytes of a quantised weight [outputs, inputs].

    Scales: float32 for each started block of method fp8, bfloat16 of compressed-tensors, one byte of the MX formats.
    """
    rows, columns = stored.block
    groups = -(-inputs // (columns or inputs))
    scales = -(-outputs // (rows or outputs)) * groups
    activations = _FLOAT32 * stored.has_activation_scales
    match stored.storage:
        case Storage.FP8:
            return outputs * inputs + (_FLOAT32 if stored.method == "fp8" else _BFLOAT16) * scales + activations
        case Storage.INT4:
            zeros = 0 if stored.is_symmetric else _FLOAT32 * -(-outputs // 8) * groups
            return _FLOAT32 * outputs * -(-inputs // 8) + _BFLOAT16 * scales + zeros + _SHAPE
        case Storage.MXFP4 | Storage.MXFP4_EXPERTS:
            return outputs * (-(-inputs // 2) + -(-inputs // MX_GROUP))
