"""Laws of single formulas: every code of every number format, the order of bits, and pieces that change nothing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from batchgen_beam.config.quantization import Quantization, Storage
from batchgen_beam.weights import quantized_reader
from batchgen_beam.weights.headers import TensorFacts, read_header
from batchgen_beam.weights.quantized_reader import read_quantized, read_quantized_expert
from batchgen_beam.weights.quantized_storage import QuantizedTensor, check_parts
from batchgen_beam.weights.quantized_values import fp8_values, int4_values, mxfp4_values, scale_values
from tests.weights.quantized_tensors import e2m1, e4m3, e8m0, fp8_block, mxfp4_experts

BYTES = torch.arange(256, dtype=torch.uint8)


def same(found: torch.Tensor, wanted: list[float]) -> bool:
    """Bit for bit; not a number equals itself, and zero does not equal minus zero."""
    expected = torch.tensor(wanted)
    known = ~expected.isnan()
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(
        found[known].view(torch.int32), expected[known].view(torch.int32))


def test_every_float8_code() -> None:
    """All 256 codes of E4M3, of which 127 and 255 are not numbers and 126 is the largest, 448."""
    found = fp8_values(BYTES.view(torch.float8_e4m3fn)[None], torch.ones(1, 1), (None, None))[0]
    assert same(found, [e4m3(code) for code in range(256)])
    assert found[126] == 448.0
    assert math.isnan(found[255])


def test_every_exponent() -> None:
    """All 256 exponents, from 2**-127 up to 2**127, and 255, which is not a number; in either number format."""
    wanted = [e8m0(code) for code in range(256)]
    assert same(scale_values(BYTES), wanted)
    assert same(scale_values(BYTES.view(torch.float8_e8m0fnu)), wanted)


def test_every_pair_of_float4() -> None:
    """All 256 bytes hold two E2M1 numbers, that of the low bits first; minus zero stays."""
    found = mxfp4_values(BYTES.view(16, 16), torch.ones(16, 1)).flatten()
    assert same(found, [value for code in range(256) for value in (e2m1(code & 15), e2m1(code >> 4))])


def test_order_of_int4() -> None:
    """The words 0x76543210 and 0xFEDCBA98 hold -8 to 7 in order."""
    words = torch.tensor([[0x76543210, 0xFEDCBA98 - (1 << 32)]], dtype=torch.int32)
    assert int4_values(words, torch.ones(1, 1), None, 16, None)[0].tolist() == list(range(-8, 8))


@pytest.mark.parametrize("shape", [(160, 200), (576, 130), (1, 1), (128, 128), (129, 1)])
def test_ragged_blocks(shape: tuple[int, int]) -> None:
    """Blocks of 128 by 128 begin at multiples of 128, whatever the size: the last are cut off, none is stretched."""
    parts, wanted = fp8_block((128, 128), "float")(shape, torch.Generator().manual_seed(sum(shape)))
    assert torch.equal(fp8_values(parts[""], parts["_scale_inv"], (128, 128)), wanted)


def experts_tensor(folder: Path) -> tuple[QuantizedTensor, torch.Tensor]:
    """A stored MXFP4 tensor `[3, 64, 10]` of three experts, and its values."""
    parts, values = mxfp4_experts((3, 64, 10), torch.Generator().manual_seed(5))
    save_file({f"experts.down_proj{end}": part for end, part in parts.items()}, folder / "x.safetensors")
    header = read_header(folder / "x.safetensors")
    how = Quantization(method="mxfp4", storage=Storage.MXFP4_EXPERTS, block=(1, 32))
    return QuantizedTensor(name="experts.down_proj", quantization=how, weight=header["experts.down_proj_blocks"],
                           scale=header["experts.down_proj_scales"]), values


@pytest.mark.parametrize("piece", [1, 200, 1 << 22])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_one_expert_of_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int, piece: int) -> None:
    """An expert is cut out of the stored tensor in pieces of any size, without looking at another's numbers."""
    monkeypatch.setattr(quantized_reader, "PIECE", piece)
    tensor, values = experts_tensor(tmp_path)
    check_parts(tensor, (3, 64, 10))
    asked = []

    class Watched:
        """A slice that notes which experts are asked for."""

        def __init__(self, part: object) -> None:
            self._part = part

        def __getitem__(self, key: tuple[int, slice]) -> torch.Tensor:
            asked.append(key[0])
            return self._part[key]  # type: ignore[index, no-any-return]

    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        def watch(part: TensorFacts) -> Watched:
            return Watched(file.get_slice(part.name))

        found = read_quantized_expert(tensor, (3, 64, 10), index, watch, torch.float32)
    assert torch.equal(found, values[index])
    assert set(asked) == {index}


@pytest.mark.parametrize("piece", [1, 700, 20_000])
def test_pieces_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Rows are dequantised a bounded number at a time, in whole blocks, and rounded once from float32."""
    shape = (70, 50)
    parts, values = fp8_block((16, 24), "float")(shape, torch.Generator().manual_seed(3))
    save_file({f"w{end}": part for end, part in parts.items()}, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    how = Quantization(method="fp8", storage=Storage.FP8, block=(16, 24))
    tensor = QuantizedTensor(name="w", quantization=how, weight=header["w"], scale=header["w_scale_inv"])
    monkeypatch.setattr(quantized_reader, "PIECE", piece)
    sizes = []

    def count(*given: torch.Tensor) -> torch.Tensor:
        sizes.append(given[0].numel())
        return fp8_values(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(quantized_reader, "fp8_values", count)
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        found = read_quantized(tensor, shape, lambda part: file.get_slice(part.name), torch.bfloat16)
    assert torch.equal(found, values.to(torch.bfloat16))
    assert max(sizes) <= max(piece, 16 * 50)
    assert sum(sizes) == 70 * 50
