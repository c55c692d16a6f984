"""Laws of the torch kernel set's products and line-by-line operations."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from batchgen_beam.kernels import gemm
from batchgen_beam.kernels.packing import PlainPacking
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.interface import CacheKind, CacheSpec, GroupKey
from batchgen_beam.weights.packing import Product
from tests.kernels.views import PAGE, tables, view

DTYPES = [torch.float32, torch.bfloat16]
BATCHES = [1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 100, 199]
SHAPES = [(960, 576), (576, 1536), (40, 24)]
ULP = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7}


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Thread counts: how an array is cut between threads must not reach the bits of a row."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers that follow from the seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rows_agree(operation: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether the first and the last rows have the same bits in batches of many sizes as among all of `x`."""
    whole = operation(x)
    return all(torch.equal(operation(x[:n]), whole[:n]) and torch.equal(operation(x[-n:]), whole[-n:]) for n in BATCHES)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_row_depends_on_itself_alone(dtype: torch.dtype, shape: tuple[int, int], threads: int) -> None:
    """The bits of a row do not depend on the number of rows or on its place among them, biases included."""
    outputs, inputs = shape
    kernels = TorchKernels(dtype)
    half = outputs // 2
    weight = kernels.pack([normal(half, inputs, seed=1), normal(half, inputs, seed=2)],
                          biases=[normal(half, seed=3), normal(half, seed=4)])
    assert rows_agree(lambda x: kernels.linear(x, weight), normal(200, inputs, dtype=dtype))


def test_where_bfloat16_has_no_product_it_is_that_of_float32_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU without AVX-512, block by block: the bits of the float32 product of the same values, rounded once,
    for any batch; and a weight that was adopted does not change with the memory it came from."""
    monkeypatch.setattr(gemm, "is_widened", lambda device, dtype: dtype is torch.bfloat16)
    monkeypatch.setattr(gemm, "WIDENED_VALUES", 200 * 576)
    half, single = TorchKernels(torch.bfloat16), TorchKernels(torch.float32)
    weight_NK, bias_N = normal(960, 576, seed=1, dtype=torch.bfloat16), normal(960, seed=2, dtype=torch.bfloat16)
    product = Product(parts=("weight",), biases=("bias",), outputs=(960,), inputs=576)
    packed = PlainPacking(half).adopt(product, [memory_NK := weight_NK.clone(), bias_N])
    assert packed.widened
    assert len(packed.blocks) == 5
    memory_NK.zero_()
    x_TK = normal(200, 576, dtype=torch.bfloat16)
    exact = single.linear(x_TK.float(), single.pack([weight_NK], biases=[bias_N]))
    assert torch.equal(half.linear(x_TK, packed), exact.bfloat16())
    assert rows_agree(lambda x: half.linear(x, packed), x_TK)


def test_a_product_that_knows_its_batch_is_told_apart() -> None:
    """The comparison can fail: a product that grows by one part in 2^20 with each row of its batch does not pass."""
    kernels = TorchKernels(torch.float32)
    weight = kernels.pack([normal(576, 1536, seed=1)])
    assert not rows_agree(lambda x: kernels.linear(x, weight) * (1 + len(x) * 2.0**-20), normal(200, 1536))


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_right_and_rounded_once(dtype: torch.dtype) -> None:
    """Against float64: half an ulp of the result's own rounding, and 576 float32 sums of order one before it."""
    kernels = TorchKernels(dtype)
    x, w, b = (normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate([(33, 576), (96, 576), (96,)]))
    exact = x.double() @ w.double().T + b.double()
    error = (kernels.linear(x, kernels.pack([w], biases=[b])).double() - exact).abs()
    # Partial sums of 576 products stay under 150, so each float32 addition errs by at most 150 * 2^-24 = 9e-6; errors
    # of random sign add up like sqrt(576) = 24 of them.
    assert (error <= exact.abs() * ULP[dtype] / 2 + 24 * 150 * 2.0**-24).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_float32_and_never_rounded_to_less(dtype: torch.dtype, threads: int) -> None:
    """The head gives float32 values that bfloat16 can't hold, the same for a row alone and in a batch."""
    kernels = TorchKernels(dtype)
    weight = kernels.pack_head(normal(5003, 576, seed=1, dtype=dtype))
    x = normal(200, 576, dtype=dtype)
    logits = kernels.head(x, weight)
    assert logits.dtype is torch.float32
    assert (logits != logits.bfloat16().float()).float().mean() > 0.9
    assert rows_agree(lambda rows: kernels.head(rows, weight), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 576, 1536])
def test_lines_depend_on_themselves_alone(dtype: torch.dtype, width: int, threads: int) -> None:
    """Norms, activations and rotations: no bit moves with the batch, even for widths that no vector length divides."""
    kernels = TorchKernels(dtype)
    scale, angles = normal(width, seed=1, dtype=dtype), normal(width, seed=2)
    assert rows_agree(lambda x: kernels.rms_norm(x, scale, 1e-5), normal(200, width, dtype=dtype))
    assert rows_agree(kernels.swiglu, 3 * normal(200, 2 * width, dtype=dtype))

    def rotate(x: Tensor) -> Tensor:
        return kernels.rope(x, angles.expand(len(x), -1), (1 - angles).expand(len(x), -1))

    assert rows_agree(rotate, normal(200, 3, 2 * width, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_lines_follow_their_formulas(dtype: torch.dtype) -> None:
    """Norm, activation and rotation against float64: the float32 inside costs far less than the final rounding."""
    kernels = TorchKernels(dtype)
    x, w = normal(50, 64, dtype=dtype), normal(64, seed=1, dtype=dtype)
    wide, scale = x.double(), w.double()
    norm = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale
    gate, up = wide.chunk(2, -1)
    activation = gate * torch.sigmoid(gate) * up
    angle = torch.outer(torch.arange(50.0), 0.1 ** torch.arange(32.0))
    rotated = torch.polar(torch.ones_like(angle), angle).to(torch.complex128) * torch.complex(gate, up)
    found = kernels.rope(x[:, None], angle.cos(), angle.sin())[:, 0].double()
    for got, exact in ((kernels.rms_norm(x, w, 1e-5).double(), norm), (kernels.swiglu(x).double(), activation),
                       (found, torch.cat((rotated.real, rotated.imag), -1))):
        # A few float32 roundings inside (values under 16), one of the result outside.
        assert ((got - exact).abs() <= exact.abs() * ULP[dtype] / 2 + 16 * 2.0**-22).all()


def test_appended_entries_stand_in_the_pages_of_their_row() -> None:
    """`append` writes position p of row r at (table[r, p / page], p mod page), and nowhere else; page 0 stays zero."""
    kernels = TorchKernels(torch.bfloat16)
    spec = CacheSpec(name="k", kind=CacheKind.PAGED, shape=(2, 8), dtype=torch.bfloat16)
    rows = [range(60, 70), range(5), range(127, 128)]
    table = tables([row.stop for row in rows], torch.Generator().manual_seed(1))
    values = normal(sum(map(len, rows)), 2, 8, dtype=torch.bfloat16)
    cache = kernels.allocate(spec, 8, PAGE)
    kernels.append(cache, values, spec, view(rows, table, GroupKey(CacheKind.PAGED)))
    lines = iter(values)
    for row, places in enumerate(rows):
        for place in places:
            assert torch.equal(cache[table[row, place // PAGE], :, place % PAGE], next(lines))
    assert cache.count_nonzero() == values.count_nonzero()
    assert not cache[0].any()


def test_state_slots_have_the_shape_of_one_sequence() -> None:
    """A `state` entry is one slot per sequence, zeroed."""
    spec = CacheSpec(name="s", kind=CacheKind.STATE, shape=(4, 3, 5), dtype=torch.float32)
    cache = TorchKernels(torch.float32).allocate(spec, 7, PAGE)
    assert cache.shape == (7, 4, 3, 5)
    assert not cache.any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_batch_is_no_special_case(dtype: torch.dtype) -> None:
    """Zero tokens, as a step in which no row wants logits has, give results of zero lines."""
    kernels = TorchKernels(dtype)
    none = normal(0, 24, dtype=dtype)
    assert kernels.linear(none, kernels.pack([normal(40, 24)])).shape == (0, 40)
    logits = kernels.head(none, kernels.pack_head(normal(50, 24)))
    assert logits.shape == (0, 50)
    assert logits.dtype is torch.float32


def test_facts_name_what_decides_the_bits() -> None:
    """Two settings that give other bits have other facts; the untiled set says that it is untiled."""
    facts = TorchKernels(torch.bfloat16).facts()
    assert {"device", "capability", "torch", "threads", "tile_rows", "dtype", "gemm"} <= facts.keys()
    assert facts["tile_rows"] == 32
    assert facts["libc"] == " ".join(platform.libc_ver())
    assert TorchKernels(torch.float32).facts() != facts
    assert TorchKernels(torch.bfloat16, tile_rows=None).facts() != facts


def test_other_dtypes_are_refused() -> None:
    """A run's dtype is float32 or bfloat16; the message says so."""
    with pytest.raises(ValueError, match=r"float32 or bfloat16, not torch\.float16"):
        TorchKernels(torch.float16)
