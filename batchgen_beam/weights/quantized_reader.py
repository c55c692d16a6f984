"""From the parts of a quantised weight to its values in the run's dtype, a piece of rows at a time.

Owns the pieces, which bound the memory beside the result, and the one rounding from float32.  Does not know files,
formulas (`quantized_values`) or which parts belong together (`quantized_storage`).

Shape letters: O output rows, I input columns.
"""

from __future__ import annotations

from collections.abc import Callable
from math import lcm
from typing import Any

import torch
from torch import Tensor

from batchgen_beam.config.quantization import Storage
from batchgen_beam.weights.headers import TensorFacts
from batchgen_beam.weights.quantized_storage import QuantizedTensor
from batchgen_beam.weights.quantized_values import fp8_values, int4_values, mxfp4_values, scale_values

__all__ = ["OpenPart", "read_quantized", "read_quantized_expert"]

OpenPart = Callable[[TensorFacts], Any]
"""A stored tensor that is read when it is indexed, as `safe_open.get_slice` gives it."""

PIECE = 1 << 22
"""Numbers dequantised at once: 16 MiB of float32."""
_ZERO_POINTS_A_WORD = 8


def read_quantized(tensor: QuantizedTensor, shape: tuple[int, ...], open_part: OpenPart, dtype: torch.dtype) -> Tensor:
    """The weight of `shape`, which its parts have been checked for, dequantised to float32 and rounded to `dtype`."""
    weight, scale_rc, zeros = open_part(tensor.weight), _scale(tensor, open_part(tensor.scale)[...]), None
    if tensor.zero_point is not None:
        zeros = open_part(tensor.zero_point)[...]
    rows, columns = tensor.quantization.block

    def values(start: int, stop: int) -> Tensor:
        """Rows from `start`, a multiple of a block's rows and of a word's zero points, to `stop`."""
        piece, scale = weight[start:stop], scale_rc if rows is None else scale_rc[start // rows:-(-stop // rows)]
        if tensor.quantization.storage is Storage.FP8:
            return fp8_values(piece, scale, (rows, columns))
        if tensor.quantization.storage is Storage.MXFP4:
            return mxfp4_values(piece, scale)
        zero_points = None if zeros is None else zeros[start // _ZERO_POINTS_A_WORD:-(-stop // _ZERO_POINTS_A_WORD)]
        return int4_values(piece, scale, zero_points, shape[1], columns)

    return _by_pieces(values, shape, lcm(rows or 1, _ZERO_POINTS_A_WORD), dtype)


def read_quantized_expert(tensor: QuantizedTensor, shape: tuple[int, ...], index: int, open_part: OpenPart,
                          dtype: torch.dtype) -> Tensor:
    """One expert `[I, O]` of a weight `[E, I, O]` that holds all; reads no number of another."""
    _, inputs, outputs = shape
    weight, scale = open_part(tensor.weight), open_part(tensor.scale)

    def values(start: int, stop: int) -> Tensor:
        return mxfp4_values(weight[index, start:stop].flatten(1), scale_values(scale[index, start:stop]))

    return _by_pieces(values, (outputs, inputs), 1, dtype).t()


def _scale(tensor: QuantizedTensor, stored: Tensor) -> Tensor:
    """Scales as float32 of two dimensions, also where the file left out those that all rows or columns share."""
    rows, columns = tensor.quantization.block
    return scale_values(stored).reshape(1 if rows is None else len(stored), -1 if columns is not None else 1)


def _by_pieces(values: Callable[[int, int], Tensor], shape_OI: tuple[int, ...], step: int,
               dtype: torch.dtype) -> Tensor:
    result_OI = torch.empty(shape_OI, dtype=dtype)
    rows = max(1, PIECE // (shape_OI[1] * step)) * step
    for start in range(0, shape_OI[0], rows):
        stop = min(start + rows, shape_OI[0])
        result_OI[start:stop] = values(start, stop)
    return result_OI
