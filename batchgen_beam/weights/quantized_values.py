"""What quantised numbers are worth: each storage's formula, from stored tensors to float32.

Does not know names, files, shapes that a model asks for, or the run's dtype.  Sources: OCP 8-bit Floating Point 1.0
(E4M3), OCP Microscaling Formats 1.0 (E2M1, E8M0), and compressed-tensors' `pack_to_int32` for the order of INT4.

Shape suffixes: R rows, C columns, r and c rows and columns of the scales, P bytes of two numbers, w words of eight.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fp8_values", "int4_values", "mxfp4_values", "scale_values"]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_PAIRS = torch.tensor([(_E2M1[byte & 15], _E2M1[byte >> 4]) for byte in range(256)])
"""The two numbers of a byte: the low bits are the earlier one."""
_NIBBLES = torch.arange(0, 32, 4, dtype=torch.int32)
_INT4_ZERO = 8


def scale_values(scale: Tensor) -> Tensor:
    """Scales as float32.  Bytes are exponents of 2 with a bias of 127, of which 255 is not a number."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


def fp8_values(weight_RC: Tensor, scale_rc: Tensor, block: tuple[int | None, int | None]) -> Tensor:
    """Each number times the scale of its block of rows and columns (None: all of them); the last blocks may be cut."""
    for dimension, each in enumerate(block):
        if each is not None:
            scale_rc = scale_rc.repeat_interleave(each, dimension).narrow(dimension, 0, weight_RC.shape[dimension])
    return weight_RC.float() * scale_rc


def int4_values(packed_Rw: Tensor, scale_Rc: Tensor, zero_points_wc: Tensor | None, columns: int,
                group: int | None) -> Tensor:
    """Each number of -8 to 7 less its group's zero point, times its group's scale.

    A word holds eight numbers of a row, the lowest bits first, each with 8 added; zero points lie so along the rows.
    """
    numbers_RC = _unpack(packed_Rw).flatten(1)[:, :columns]
    if zero_points_wc is None:
        zeros_Rc = torch.full_like(scale_Rc, _INT4_ZERO)
    else:
        zeros_Rc = _unpack(zero_points_wc).transpose(1, 2).flatten(0, 1)[:len(packed_Rw)].float()
    if group is not None:
        zeros_Rc, scale_Rc = (each.repeat_interleave(group, 1)[:, :columns] for each in (zeros_Rc, scale_Rc))
    return (numbers_RC.float() - zeros_Rc) * scale_Rc


def _unpack(words: Tensor) -> Tensor:
    """The eight numbers of each word of four bits each, in a last dimension more."""
    return (words[..., None] >> _NIBBLES) & 15


def mxfp4_values(packed_RP: Tensor, scale_Rc: Tensor) -> Tensor:
    """Two numbers of four bits (E2M1) a byte, each times its group's scale, `[R, 2 P]`."""
    values_RC = _PAIRS[packed_RP.int()].flatten(1)
    return values_RC * scale_Rc.repeat_interleave(values_RC.shape[1] // scale_Rc.shape[1], 1)
