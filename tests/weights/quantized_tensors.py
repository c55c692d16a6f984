"""Random quantised weights of every storage, and what they are worth, number by number in plain Python.

The values are computed from the formats' definitions without torch's float8 types or tensor operations, so that they
agree with the package's only if both are right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3(code: int) -> float:
    """OCP 8-bit Floating Point 1.0, table 1: bias 7, no infinities, all ones is not a number."""
    exponent, fraction, sign = code >> 3 & 15, code & 7, -1.0 if code & 128 else 1.0
    if exponent == 15 and fraction == 7:
        return math.nan
    return sign * (math.ldexp(fraction, -9) if exponent == 0 else math.ldexp(8 + fraction, exponent - 10))


def e2m1(code: int) -> float:
    """OCP Microscaling Formats 1.0, table 5."""
    return -E2M1[code & 7] if code & 8 else E2M1[code]


def e8m0(code: int) -> float:
    """A power of two with a bias of 127."""
    return math.nan if code == 255 else math.ldexp(1.0, code - 127)


def codes(shape: tuple[int, ...], generator: torch.Generator, low: int = 0, high: int = 256) -> Tensor:
    """Random bytes of `low` to `high - 1`."""
    return torch.randint(low, high, shape, generator=generator).to(torch.uint8)


def scales(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random scales of about a thousandth, so that FP8 weights are of usual size."""
    return torch.rand(shape, generator=generator) * 1e-3 + 1e-4


@dataclass(frozen=True, kw_only=True)
class Form:
    """A storage: config.json's description, and `make(shape, generator)`: parts by ending, and the values."""

    config: dict[str, Any]
    make: Callable[[tuple[int, int], torch.Generator], tuple[dict[str, Tensor], Tensor]]


def fp8_block(block: tuple[int, int], kind: str,
              end: str = "_scale_inv") -> Callable[..., tuple[dict[str, Tensor], Tensor]]:
    """FP8 in blocks, with float32 scales or exponents as bytes or as the number format for them."""
    def make(shape: tuple[int, int], generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = shape
        weight = codes(shape, generator, high=127) | codes(shape, generator, high=2) << 7
        grid = -(-rows // block[0]), -(-columns // block[1])
        scale = scales(grid, generator) if kind == "float" else codes(grid, generator, 114, 118)
        worth = scale.tolist() if kind == "float" else [[e8m0(code) for code in row] for row in scale.tolist()]
        values = [[e4m3(code) * worth[r // block[0]][c // block[1]] for c, code in enumerate(row)]
                  for r, row in enumerate(weight.tolist())]
        stored = scale.view(torch.float8_e8m0fnu) if kind == "exponent" else scale
        return {"": weight.view(torch.float8_e4m3fn), end: stored}, torch.tensor(values)
    return make


def fp8_lines(each_row: bool, scale_shape: Callable[[int], tuple[int, ...]],
              end: str = "_scale") -> Callable[..., tuple[dict[str, Tensor], Tensor]]:
    """FP8 with a scale a row, or one for all."""
    def make(shape: tuple[int, int], generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        weight = codes(shape, generator, high=127)
        scale = scales(scale_shape(shape[0]), generator).to(torch.bfloat16)
        worth = scale.float().flatten().tolist()
        values = [[e4m3(code) * worth[r if each_row else 0] for code in row] for r, row in enumerate(weight.tolist())]
        return {"": weight.view(torch.float8_e4m3fn), end: scale}, torch.tensor(values)
    return make


def pack(numbers: list[int]) -> list[int]:
    """Numbers of four bits, eight a word, the lowest bits first, as signed words of 32 bits."""
    words = []
    for start in range(0, len(numbers), 8):
        word = sum(number << 4 * i for i, number in enumerate(numbers[start:start + 8]))
        words.append(word - (1 << 32) if word >= 1 << 31 else word)
    return words


def int4(group: int | None, symmetric: bool = True) -> Callable[..., tuple[dict[str, Tensor], Tensor]]:
    """INT4 of compressed-tensors in groups of columns (None: a row)."""
    def make(shape: tuple[int, int], generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = shape
        groups = 1 if group is None else -(-columns // group)
        numbers = codes(shape, generator, high=16).tolist()
        zeros = codes((rows, groups), generator, high=16).tolist()
        scale = (scales((rows, groups), generator) * 16).to(torch.bfloat16)
        worth = scale.float().tolist()
        size = group or columns
        values = [[(number - (8 if symmetric else zeros[r][c // size])) * worth[r][c // size]
                   for c, number in enumerate(row)] for r, row in enumerate(numbers)]
        parts = {"_packed": torch.tensor([pack(row) for row in numbers], dtype=torch.int32), "_scale": scale,
                 "_shape": torch.tensor(shape)}
        if not symmetric:
            by_group = [pack([zeros[r][g] for r in range(rows)]) for g in range(groups)]
            parts["_zero_point"] = torch.tensor(by_group, dtype=torch.int32).T.contiguous()
        return parts, torch.tensor(values)
    return make


def mxfp4(shape: tuple[int, int], generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """MXFP4 of compressed-tensors."""
    rows, columns = shape
    packed, scale = codes((rows, columns // 2), generator), codes((rows, -(-columns // 32)), generator, 118, 124)
    values = [[e2m1(packed_row[c // 2] >> 4 * (c % 2) & 15) * e8m0(scale_row[c // 32]) for c in range(columns)]
              for packed_row, scale_row in zip(packed.tolist(), scale.tolist(), strict=True)]
    return {"_packed": packed, "_scale": scale}, torch.tensor(values)


def mxfp4_experts(shape: tuple[int, int, int], generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """MXFP4 of GPT-OSS for a weight `[E, I, O]`: blocks `[E, O, I / 32, 16]`, scales `[E, O, I / 32]`."""
    experts, inputs, outputs = shape
    made = [mxfp4((outputs, inputs), generator) for _ in range(experts)]
    blocks = torch.stack([parts["_packed"].view(outputs, inputs // 32, 16) for parts, _ in made])
    return ({"_blocks": blocks, "_scales": torch.stack([parts["_scale"] for parts, _ in made])},
            torch.stack([values.T for _, values in made]).contiguous())


def compressed(form: str, bits: int, kind: str, **weights: object) -> dict[str, Any]:
    """A compressed-tensors description with one group."""
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"],
                                          "weights": {"num_bits": bits, "type": kind, **weights}}}}


def fp8(block: list[int] | None) -> dict[str, Any]:
    """A description of method fp8."""
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}


FORMS = {
    "fp8 ragged blocks": Form(config=fp8([48, 40]), make=fp8_block((48, 40), "float")),
    "fp8 ragged last blocks": Form(config=fp8([128, 128]), make=fp8_block((128, 128), "float")),
    "fp8 exponents in bytes": Form(config=fp8([32, 32]), make=fp8_block((32, 32), "bytes")),
    "fp8 exponents": Form(config=fp8([128, 128]), make=fp8_block((128, 128), "exponent")),
    "fp8 one scale": Form(config=fp8(None), make=fp8_lines(False, lambda rows: (), "_scale_inv")),
    "float-quantized block": Form(
        config=compressed("float-quantized", 8, "float", strategy="block", block_structure=[40, 48]),
        make=fp8_block((40, 48), "float", "_scale")),
    "float-quantized channel": Form(config=compressed("float-quantized", 8, "float", strategy="channel"),
                                    make=fp8_lines(True, lambda rows: (rows, 1))),
    "float-quantized flat channel": Form(config=compressed("float-quantized", 8, "float", strategy="channel"),
                                         make=fp8_lines(True, lambda rows: (rows,))),
    "float-quantized tensor": Form(config=compressed("float-quantized", 8, "float", strategy="tensor"),
                                   make=fp8_lines(False, lambda rows: (1,))),
    "int4": Form(config=compressed("pack-quantized", 4, "int", strategy="group", group_size=32, symmetric=True),
                 make=int4(32)),
    "int4 cut group": Form(config=compressed("pack-quantized", 4, "int", strategy="group", group_size=48),
                           make=int4(48)),
    "int4 channel": Form(config=compressed("pack-quantized", 4, "int", strategy="channel"), make=int4(None)),
    "int4 zero points": Form(
        config=compressed("pack-quantized", 4, "int", strategy="group", group_size=16, symmetric=False),
        make=int4(16, symmetric=False)),
    "mxfp4": Form(config=compressed("mxfp4-pack-quantized", 4, "float", strategy="group", group_size=32), make=mxfp4),
}

GPT_OSS_EXPERTS = Form(
    config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    make=mxfp4_experts)  # type: ignore[arg-type]
"""Weights of three dimensions, the experts of a layer together."""
