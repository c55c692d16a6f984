"""Matrix products whose rows do not know each other.

A GEMM library chooses its kernel, and with it the order of a dot product's sums, by the number of rows; a row's
bits then depend on the batch.  Here every product has the same number of rows: the batch is cut into tiles of
`tile_rows`, the last one filled up with zeros.  Does not know layers, caches or attention.

Shape suffixes: T rows, K inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["PackedLinear", "has_prepacking", "in_tiles", "is_widened", "pack_linear"]

WIDENED_VALUES = 1 << 19
"""Of a bfloat16 weight that are in float32 at a time where products are computed so."""


def has_prepacking(device: torch.device) -> bool:
    """Whether oneDNN's private prepacked product is there (CPU builds of torch with oneDNN).

    At 32 rows it measured 2.4 times the rate of `F.linear` in float32 and 1.3 times in bfloat16.
    """
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))


def is_widened(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products of bfloat16 are computed in float32 and rounded once: on a CPU without AVX-512 or its like,
    where oneDNN has none in bfloat16."""
    return (dtype is torch.bfloat16 and has_prepacking(device)
            and not torch.ops.mkldnn._is_mkldnn_bf16_supported())


SPAN = 192
"""Inputs that oneDNN sums in one chain in float32.  Left alone it runs through all of K, with twice the rounding error
of `F.linear`: SmolLM2's float32 logits then differ from the reference by 1.3e-4, with spans by 6e-5."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear:
    """A `[N, K]` weight in the form the product wants: whole, or as oneDNN blocks of `span` inputs.

    `widened`: some outputs a block, in bfloat16; `in_float32` makes of each what the product of float32 wants.
    """

    blocks: tuple[Tensor, ...]
    bias_N: Tensor | None
    outputs: int
    span: int | None
    widened: bool = False

    def __call__(self, x_TK: Tensor) -> Tensor:
        """`x @ weight.T (+ bias)`, [T, N]; the blocks' sums are added in ascending order of K."""
        if self.span is None:
            return F.linear(x_TK, self.blocks[0], self.bias_N)
        total: Tensor | None = None
        for i, block in enumerate(self.blocks):
            x_TS = x_TK[:, i * self.span : (i + 1) * self.span].contiguous()
            bias_N = self.bias_N if i == 0 else None
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x_TS, block, bias_N, "none", [], "")
            total = product if total is None else total.add_(product)
        assert total is not None
        return total

    def apart_from(self, tensor: Tensor) -> PackedLinear:
        """The same, in memory of its own where it lay in that of `tensor`."""
        memory = tensor.untyped_storage().data_ptr()
        if all(block.is_mkldnn or block.untyped_storage().data_ptr() != memory for block in self.blocks):
            return self
        return replace(self, blocks=tuple(block.clone() for block in self.blocks))

    def in_float32(self, tile_rows: int) -> Iterator[PackedLinear]:
        """Block by block, each of them gone when the next one is asked for."""
        biases = [None] * len(self.blocks) if self.bias_N is None else \
            torch.split(self.bias_N, [len(block) for block in self.blocks])
        for block_NK, bias_N in zip(self.blocks, biases, strict=True):
            yield pack_linear([block_NK], None if bias_N is None else [bias_N], dtype=torch.float32,
                              device=block_NK.device, tile_rows=tile_rows, span=SPAN)


def pack_linear(weights: Sequence[Tensor], biases: Sequence[Tensor] | None, *, dtype: torch.dtype,
                device: torch.device, tile_rows: int | None, span: int | None = None) -> PackedLinear:
    """Weights of equal K stacked along N; prepacked for the tile where this torch can, in blocks of `span` inputs."""
    weight_NK = _stacked(weights, dtype, device)
    bias_N = None if biases is None else _stacked(biases, dtype, device)
    outputs = weight_NK.shape[0]
    if tile_rows is None or not has_prepacking(device):
        return PackedLinear(blocks=(weight_NK,), bias_N=bias_N, outputs=outputs, span=None)
    if is_widened(device, dtype):
        parts = torch.split(weight_NK, max(1, WIDENED_VALUES // weight_NK.shape[1]))
        return PackedLinear(blocks=parts, bias_N=bias_N, outputs=outputs, span=None, widened=True)
    span = span or weight_NK.shape[1]
    blocks = tuple(torch.ops.mkldnn._reorder_linear_weight(part_NS.contiguous(), tile_rows)
                   for part_NS in torch.split(weight_NK, span, 1))
    return PackedLinear(blocks=blocks, bias_N=bias_N, outputs=outputs, span=span)


def _stacked(parts: Sequence[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """One contiguous tensor; a single part is not copied needlessly, for a head can be large."""
    moved = [part.to(device=device, dtype=dtype) for part in parts]
    return moved[0].contiguous() if len(moved) == 1 else torch.cat(moved)


def in_tiles(x_TK: Tensor, linear: PackedLinear, tile_rows: int | None) -> Tensor:
    """`linear(x)` in products of exactly `tile_rows` rows; None leaves the batch whole, which breaks the law."""
    rows = x_TK.shape[0]
    if rows == 0:
        return x_TK.new_empty(0, linear.outputs)
    if tile_rows is None:
        return linear(x_TK)
    if linear.widened:
        wide_TK = x_TK.float()
        parts = [in_tiles(wide_TK, part, tile_rows).to(x_TK.dtype) for part in linear.in_float32(tile_rows)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    x_TK = x_TK.contiguous()
    rest = rows % tile_rows
    tiles = [linear(x_TK[start : start + tile_rows]) for start in range(0, rows - rest, tile_rows)]
    if rest:
        last = x_TK.new_zeros(tile_rows, x_TK.shape[1])
        last[:rest] = x_TK[rows - rest :]
        tiles.append(linear(last)[:rest])
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)
