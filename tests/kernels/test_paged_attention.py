"""Laws of attention over pages: right, blind to company, and untouched by what stands in slots that it can't see."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen_beam.kernels.int8_pages import quantise, widen
from batchgen_beam.kernels.paged_attention import query_block
from batchgen_beam.models.interface import CacheKind, CacheSpec
from tests.kernels.sets import BFLOAT16_SETS, EVERY_SET, FLOAT32_SETS, MakeKernels
from tests.kernels.views import PAGE, tables, view

BOTH_DTYPES = FLOAT32_SETS + BFLOAT16_SETS
CONTEXTS = [300, 65, 64, 1, 130]


class Rows:
    """Rows with queries, keys and values of every position, and their filled caches."""

    def __init__(self, make: MakeKernels, *, window: int | None = None, contexts: list[int] = CONTEXTS, heads: int = 9,
                 kv_heads: int = 3, size: int = 64, entries: tuple[list[Tensor], list[Tensor]] | None = None) -> None:
        """`entries` are the keys and values, random if there are none; where a set keeps them as int8, `keys` and
        `values` are what it reads back."""
        generator = torch.Generator().manual_seed(5)
        kind = CacheKind.PAGED if window is None else CacheKind.WINDOWED
        self.kernels = make()
        dtype = self.kernels.dtype
        self.spec, self.value_spec = (
            CacheSpec(name=name, kind=kind, shape=(kv_heads, size), dtype=self.kernels.kv_dtype, window=window)
            for name in ("k", "v"))
        self.table = tables(contexts, generator)
        self.queries, *drawn = (
            [(2 * torch.randn(n, h, size, generator=generator)).to(dtype) for n in contexts]
            for h in (heads, kv_heads, kv_heads))
        self.given_keys, self.given_values = entries or drawn
        self.keys, self.values = ([self.kept(part) for part in given] for given in (self.given_keys, self.given_values))
        pages = int(self.table.max()) + 1
        self.key_cache, self.value_cache = (self.kernels.allocate(self.spec, pages, PAGE) for _ in range(2))
        everything = view([range(n) for n in contexts], self.table, self.spec.group)
        self.kernels.append(self.key_cache, torch.cat(self.given_keys), self.spec, everything)
        self.kernels.append(self.value_cache, torch.cat(self.given_values), self.value_spec, everything)

    def kept(self, entries: Tensor) -> Tensor:
        """What the set reads back of these entries."""
        return widen(quantise(entries), self.kernels.dtype) if self.spec.is_scaled else entries

    def attend(self, parts: dict[int, range], table: Tensor | None = None) -> dict[int, Tensor]:
        """Attention of these positions of these rows in one batch, by row."""
        table = self.table if table is None else table
        batch = view(list(parts.values()), table[list(parts)], self.spec.group)
        queries = torch.cat([self.queries[row][part.start : part.stop] for row, part in parts.items()])
        mixed = self.kernels.attention(queries, (self.spec, self.key_cache), (self.value_spec, self.value_cache),
                                       batch, queries.shape[-1] ** -0.5)
        return dict(zip(parts, mixed.split([len(part) for part in parts.values()]), strict=True))

    def by_position(self) -> tuple[Tensor, Tensor]:
        """Views of both caches as [pages, G, S, ...]: the native set keeps a page's keys, or pairs, side by side."""
        pages, heads, tokens, size = self.key_cache.shape
        if self.kernels.name == "native":
            pair = 2 if self.kernels.dtype is torch.bfloat16 else 1
            keys = self.key_cache.view(pages, heads, size // pair, tokens, pair).transpose(2, 3)
            return keys, self.value_cache
        return self.key_cache, self.value_cache

    def everything(self) -> dict[int, Tensor]:
        return self.attend({row: range(len(q)) for row, q in enumerate(self.queries)})

    def rounded_shares(self, row: int, part: range, window: int | None = None) -> Tensor | float:
        """How much the result may differ because a path rounds shares to bfloat16, their sum too; 0 where none does.

        Each share errs by 2^-8 of itself, and so does the sum that they are divided by: twice that of the sum of shares
        times magnitudes of values.
        """
        if getattr(self.kernels, "path", None) != "avx512_bf16":
            return 0.0
        sizes = self.reference(row, part, window, values=[values.abs() for values in self.values])
        return 2 * ROUNDED[torch.bfloat16] * sizes

    def reference(self, row: int, part: range, window: int | None = None, *,
                  values: list[Tensor] | None = None) -> Tensor:
        """Dense attention of these positions of a row in float64, over other values if there are some."""
        q, k, v = (tensors[row].double().transpose(0, 1)
                   for tensors in (self.queries, self.keys, values or self.values))
        q = q[:, part.start : part.stop]
        repeat = len(q) // len(k)
        distance = torch.arange(part.start, part.stop)[:, None] - torch.arange(k.shape[1])
        seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        scores = (q @ k.repeat_interleave(repeat, 0).transpose(1, 2)) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ v.repeat_interleave(repeat, 0)).transpose(0, 1)


ROUNDED = {torch.float32: 0.0, torch.bfloat16: 2.0**-8}
"""Relative error of the result's rounding: half an ulp of bfloat16.  Inputs are the same numbers on both sides."""


def close(found: Tensor, exact: Tensor, more: Tensor | float = 0.0) -> bool:
    """float32 inside: a score of order 10 carries sqrt(64) * 10 * 2^-24 = 5e-6, which weights times values keep."""
    error = (found.double() - exact).abs()
    return bool((error <= exact.abs() * ROUNDED[found.dtype] + 2e-5 + more).all())


@pytest.mark.parametrize("make", EVERY_SET)
@pytest.mark.parametrize("window", [None, 1, 64, 100])
def test_attention_is_right(make: MakeKernels, window: int | None) -> None:
    """Every token of every row against dense attention in float64."""
    rows = Rows(make, window=window)
    for row, found in rows.everything().items():
        part = range(CONTEXTS[row])
        assert close(found, rows.reference(row, part, window), rows.rounded_shares(row, part, window))


@pytest.mark.parametrize("make", BOTH_DTYPES)
def test_the_window_matters_to_the_comparison(make: MakeKernels) -> None:
    """The comparison can fail: a windowed result is far from the reference that sees one token more."""
    rows, part = Rows(make, window=100), range(300)
    found = rows.everything()[0]
    assert not close(found, rows.reference(0, part, 101), rows.rounded_shares(0, part, 101))


@pytest.mark.parametrize("make", BOTH_DTYPES)
@pytest.mark.parametrize(("heads", "size"), [((4, 4), 80), ((8, 1), 96), ((14, 2), 16), ((6, 3), 128), ((3, 1), 256)])
def test_any_grouping_of_heads(make: MakeKernels, heads: tuple[int, int], size: int) -> None:
    """Multi-head, grouped and multi-query attention, with head sizes that are no powers of two and such that are."""
    rows, part = Rows(make, heads=heads[0], kv_heads=heads[1], size=size), range(300)
    assert close(rows.everything()[0], rows.reference(0, part), rows.rounded_shares(0, part))


@pytest.mark.parametrize("make", EVERY_SET)
@pytest.mark.parametrize("window", [None, 100])
def test_prefill_decode_and_company_give_the_same_bits(make: MakeKernels, window: int | None) -> None:
    """A token alone, in its whole prompt among other rows, and decoded among other rows: one result."""
    rows = Rows(make, window=window)
    whole = rows.everything()
    for place in range(0, 300, 23):
        assert torch.equal(rows.attend({0: range(place, place + 1)})[0][0], whole[0][place])
    decoded = rows.attend({row: range(n - 1, n) for row, n in enumerate(CONTEXTS)})
    assert all(torch.equal(one[0], whole[row][-1]) for row, one in decoded.items())


@pytest.mark.parametrize("make", BFLOAT16_SETS)
@settings(max_examples=15)
@given(cuts=st.lists(st.integers(1, 299), max_size=6, unique=True), mates=st.sets(st.sampled_from([1, 2, 3, 4])),
       window=st.sampled_from([None, 70]))
def test_no_cut_of_a_prompt_changes_a_bit(make: MakeKernels, cuts: list[int], mates: set[int],
                                          window: int | None) -> None:
    """However a prompt is cut into chunks, so wherever a token stands in its query block, and whoever rides along."""
    rows = Rows(make, window=window, heads=6, kv_heads=2, size=32)
    borders = [0, *sorted(cuts), 300]
    company = {row: range(CONTEXTS[row]) for row in mates}
    chunks = [rows.attend({0: range(a, b), **company})[0] for a, b in itertools.pairwise(borders)]
    assert torch.equal(torch.cat(chunks), rows.attend({0: range(300)})[0])


@pytest.mark.parametrize("make", BOTH_DTYPES)
def test_contexts_larger_than_the_gather_buffer(make: MakeKernels) -> None:
    """A row whose pages are gathered in several slabs: the same bits alone and in company, and right."""
    rows = Rows(make, contexts=[4096, 700], heads=9, kv_heads=3)
    last = range(4064, 4096)
    together = rows.attend({0: last, 1: range(700)})[0]
    assert torch.equal(together[-1:], rows.attend({0: range(4095, 4096)})[0])
    assert close(together, rows.reference(0, last), rows.rounded_shares(0, last))


@pytest.mark.parametrize("make", EVERY_SET)
def test_pages_behind_the_window_may_be_gone(make: MakeKernels) -> None:
    """A windowed group frees pages behind the window: their table entries become 0 and no bit changes."""
    rows = Rows(make, window=70)
    freed = rows.table.clone()
    freed[0, :3] = 0
    part = {0: range(270, 300)}
    assert torch.equal(rows.attend(part, freed)[0], rows.attend(part)[0])


@pytest.mark.parametrize("make", BOTH_DTYPES)
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), 1e30])
def test_what_an_earlier_owner_left_is_never_seen(make: MakeKernels, junk: float) -> None:
    """Slots after a row's last token may hold anything, not-a-number included, and change no bit."""
    rows = Rows(make)
    before = rows.everything()
    for row, context in enumerate(CONTEXTS):
        used = (context - 1) % PAGE + 1
        for cache in rows.by_position():
            cache[rows.table[row, (context - 1) // PAGE], :, used:] = junk
    after = rows.everything()
    assert all(torch.equal(after[row], before[row]) for row in before)


@pytest.mark.parametrize("make", BOTH_DTYPES)
def test_a_row_of_nan_keeps_it_to_itself(make: MakeKernels) -> None:
    """Not-a-number in one row's keys and values reaches that row's later tokens and no other row."""
    rows = Rows(make)
    before = rows.everything()
    for cache in rows.by_position():
        cache[rows.table[0, 1], :, 10] = torch.nan
    after = rows.everything()
    assert after[0][PAGE + 10 :].isnan().all()
    assert torch.equal(after[0][: PAGE + 8], before[0][: PAGE + 8])
    assert all(torch.equal(after[row], before[row]) for row in (1, 2, 3, 4))


@pytest.mark.parametrize("make", BOTH_DTYPES)
def test_extreme_scores_stay_finite(make: MakeKernels) -> None:
    """Scores of plus and minus thousands: the weights are one and exact zeros, not infinities."""
    rows, part = Rows(make), range(300)
    rows.queries[0] *= 1000
    found = rows.everything()[0]
    assert found.isfinite().all()
    # Scores up to 3e4 err by about 3e4 * 2^-24 * 8 = 0.014, and where two keys are level their weights by a quarter of
    # that, times values that differ by up to 8.  In bfloat16 the result and some paths' shares are rounded as well.
    assert close(found, rows.reference(0, part), 0.03 + rows.rounded_shares(0, part))
    rows.queries[0] /= 1000
    assert not close(found, rows.reference(0, part), 0.03 + rows.rounded_shares(0, part)), "milder scores would pass"


def test_the_query_block_is_a_constant_of_the_model() -> None:
    """Tokens of a block follow from the grouping of heads only: about a dozen query lines in each product."""
    assert [query_block(repeat) for repeat in (1, 3, 4, 8, 16)] == [12, 4, 3, 1, 1]
