"""Laws of keys and values kept as int8: the rounding, its error, what is broken stays so, the same on every set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen_beam.kernels.int8_pages import quantise, split_pages, widen
from batchgen_beam.kernels.native_set import NativeKernels
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.interface import CacheKind, CacheSpec, GroupKey, KernelSet
from tests.kernels.sets import DTYPES, INT8_SETS, MakeKernels, native
from tests.kernels.test_paged_attention import CONTEXTS, Rows
from tests.kernels.test_torch_set import normal
from tests.kernels.views import PAGE, tables, view

EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES)
LEAST = 2.0**-149
"""The least number over 0 in float32."""

EACH_SET = pytest.mark.parametrize("make", INT8_SETS)


def plain(values: list[float]) -> tuple[list[int], float]:
    """Multiples and scale of one head, number by number; scale and quotients are rounded to float32."""
    scale = np.float32(max(map(abs, values))) / np.float32(127)
    return [round(float(np.float32(value) / scale)) if scale else 0 for value in values], float(scale)


@EACH_DTYPE
def test_the_rounding_is_the_plain_one(dtype: torch.dtype) -> None:
    """Every scale and multiple as a plain loop finds them; what is read back is within half a step."""
    entries = normal(60, 2, 48, dtype=dtype) * torch.logspace(-20, 20, 60)[:, None, None].to(dtype)
    entries[7, 1] = 0.0
    found = quantise(entries)
    back = widen(found, torch.float32)
    for line, multiples, scale, read in zip(entries.flatten(0, 1).tolist(), found.multiples.flatten(0, 1).tolist(),
                                            found.scales.flatten().tolist(), back.flatten(0, 1).tolist(), strict=True):
        wanted, step = plain(line)
        assert step == scale
        assert multiples == wanted
        for value, again in zip(line, read, strict=True):
            assert abs(value - again) <= step / 2 + abs(value) * 2.0**-22


def test_halves_go_to_the_even_multiple() -> None:
    """A head whose step is exactly 1."""
    found = quantise(torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5, 125.5]))
    assert found.multiples.tolist() == [127, 0, 2, 2, 0, -2, -126, 126]
    assert found.scales.tolist() == [1.0]


@EACH_DTYPE
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_not_read_back_as_a_number(dtype: torch.dtype, bad: float) -> None:
    """The whole head of that token, and no other one."""
    entries = normal(3, 2, 16, dtype=dtype)
    entries[1, 0, 5] = bad
    back = widen(quantise(entries), dtype)
    assert back[1, 0].isnan().all()
    assert back.isnan().sum() == 16


@pytest.mark.parametrize("size", [71 * LEAST, 100 * LEAST, 190 * LEAST, 1e-42, 1e-40, 1e-36, 1e38, 3.4e38])
def test_numbers_next_to_zero_and_next_to_infinity(size: float) -> None:
    """Half a step, and 127 times what the scale was rounded by: 2^-24 of it, or half of the least number over 0."""
    entries = torch.tensor([size, -size, size / 2, 0.0])
    error = (widen(quantise(entries), torch.float32).double() - entries.double()).abs()
    bound = size * (1 / 254 + 2.0**-23) + 63.5 * LEAST
    assert (error <= bound).all()
    assert bound < size, "zeros would pass"


def test_a_scale_that_is_rounded_to_zero_gives_zeros() -> None:
    """Peaks up to 63 of the least steps of float32 are lost, 64 are read back as they are."""
    lost, least = (quantise(torch.tensor([peak * LEAST, -LEAST, 0.0])) for peak in (63, 64))
    assert (lost.multiples.tolist(), lost.scales.tolist()) == ([0, 0, 0], [0.0])
    assert (least.multiples.tolist(), least.scales.tolist()) == ([64, -1, 0], [LEAST])


def stored(kernels: KernelSet, cache: Tensor, spec: CacheSpec) -> tuple[Tensor, Tensor]:
    """Multiples [pages, G, S, d] and scales [pages, G, S, 1] of a cache in a set's own layout."""
    multiples, scales = split_pages(cache, spec.shape[1])
    if kernels.name == "native" and spec.name == "k":
        pair = 2 if kernels.dtype is torch.bfloat16 else 1
        pages, heads, tokens, size = multiples.shape
        multiples = multiples.reshape(pages, heads, size // pair, tokens, pair).transpose(2, 3).flatten(-2)
    return multiples, scales


@EACH_SET
@pytest.mark.parametrize("name", ["k", "v"])
def test_appended_entries_are_the_rounded_ones(make: MakeKernels, name: str) -> None:
    """Position p of row r is at (table[r, p / 64], p mod 64), with the same bits on every set; nothing else moves."""
    kernels = make()
    rows = [range(60, 70), range(5), range(127, 128)]
    table = tables([row.stop for row in rows], torch.Generator().manual_seed(1))
    entries = normal(sum(map(len, rows)), 2, 48, dtype=kernels.dtype)
    entries[2, 1] = 0.0
    entries[3, 1] *= 1e-39  # its scale is subnormal
    entries[5, 0, 3], entries[6, 1, 40], entries[7, 0, 47] = torch.nan, torch.inf, -torch.inf
    spec = CacheSpec(name=name, kind=CacheKind.PAGED, shape=(2, 48), dtype=torch.int8)
    cache = kernels.allocate(spec, 8, PAGE)
    kernels.append(cache, entries, spec, view(rows, table, GroupKey(CacheKind.PAGED)))
    multiples, scales = stored(kernels, cache, spec)
    wanted = quantise(entries)
    assert multiples.count_nonzero() == wanted.multiples.count_nonzero()
    assert scales.count_nonzero() == wanted.scales.count_nonzero()
    places = [(table[row, place // PAGE], place % PAGE) for row, part in enumerate(rows) for place in part]
    for place, (page, slot) in enumerate(places):
        assert torch.equal(multiples[page, :, slot], wanted.multiples[place])
        assert torch.equal(scales[page, :, slot].nan_to_num(), wanted.scales[place].nan_to_num())
        assert torch.equal(scales[page, :, slot].isnan(), wanted.scales[place].isnan())


def with_own_dtype(kernels: KernelSet) -> KernelSet:
    """The same set with keys and values in the dtype of the arithmetic."""
    if isinstance(kernels, NativeKernels):
        return native(kernels.dtype, kernels.path)
    return TorchKernels(kernels.dtype)


@EACH_SET
@pytest.mark.parametrize("window", [None, 100])
def test_attention_is_that_over_what_is_read_back(make: MakeKernels, window: int | None) -> None:
    """The bits of attention over a cache that holds the rounded entries as they are."""
    rows = Rows(make, window=window)
    other = Rows(lambda: with_own_dtype(make()), window=window, entries=(rows.keys, rows.values))
    found, wanted = rows.everything(), other.everything()
    assert all(torch.equal(found[row], wanted[row]) for row in wanted)


@EACH_SET
@pytest.mark.parametrize("part", ["keys", "values"])
def test_a_broken_entry_breaks_its_rows_later_tokens(make: MakeKernels, part: str) -> None:
    """Infinity in one head of position 70 makes what sees it not a number; tokens of earlier query blocks and other
    rows keep their bits."""
    rows, sound = Rows(make), Rows(make)
    entry = normal(1, 3, 64, dtype=rows.kernels.dtype)
    entry[0, 1, 9] = torch.inf
    cache, spec = (rows.key_cache, rows.spec) if part == "keys" else (rows.value_cache, rows.value_spec)
    rows.kernels.append(cache, entry, spec, view([range(70, 71)], rows.table[:1], spec.group))
    found, before = rows.everything(), sound.everything()
    assert found[0][70:, 3:6].isnan().all()
    assert torch.equal(found[0][:68], before[0][:68])
    assert all(torch.equal(found[row], before[row]) for row in range(1, len(CONTEXTS)))


@EACH_SET
@pytest.mark.parametrize("junk", [127, -1])
def test_what_an_earlier_owner_left_is_never_seen(make: MakeKernels, junk: int) -> None:
    """Slots after a row's last token may hold any bytes (four of -1 are not-a-number) and change no bit."""
    rows, cleared = Rows(make), Rows(make)
    for spec, cache in ((rows.spec, rows.key_cache), (rows.value_spec, rows.value_cache)):
        cache.fill_(junk)
        everything = view([range(n) for n in CONTEXTS], rows.table, spec.group)
        entries = rows.given_keys if spec is rows.spec else rows.given_values
        rows.kernels.append(cache, torch.cat(entries), spec, everything)
    found, wanted = rows.everything(), cleared.everything()
    assert all(torch.equal(found[row], wanted[row]) for row in wanted)


def test_a_token_takes_half_of_what_it_takes_in_bfloat16() -> None:
    """68 bytes for each head of 64 values, where bfloat16 takes 128; states are never scaled."""
    spec = CacheSpec(name="k", kind=CacheKind.PAGED, shape=(3, 64), dtype=torch.int8)
    assert (spec.is_scaled, spec.item_bytes) == (True, 3 * 68)
    state = CacheSpec(name="state", kind=CacheKind.STATE, shape=(3, 64), dtype=torch.int8)
    assert (state.is_scaled, state.item_bytes) == (False, 3 * 64)
    for make in (param.values[0] for param in INT8_SETS):
        kernels = make()
        assert kernels.allocate(spec, 5, PAGE).nbytes == 5 * PAGE * spec.item_bytes


@EACH_SET
def test_the_setting_is_among_the_facts(make: MakeKernels) -> None:
    """Bits are others, so the numeric print is; without it the facts do not mention it."""
    kernels = make()
    facts = dict(kernels.facts())
    assert facts.pop("kv_dtype") == "int8"
    assert facts == with_own_dtype(kernels).facts()


def test_other_dtypes_are_refused_by_name() -> None:
    """Only the arithmetic's dtype and int8."""
    with pytest.raises(ValueError, match=r"kept in torch\.float32 or int8 here, not in torch\.bfloat16"):
        TorchKernels(torch.float32, kv_dtype=torch.bfloat16)
