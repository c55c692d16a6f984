"""Laws of every call into the native library, whatever it computes: the caller's thread counts for nothing, and a call
over nothing does nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from batchgen_beam.kernels.native_set import NativeKernels
from batchgen_beam.models.interface import CacheKind, CacheSpec, GroupKey
from batchgen_beam.weights.loader import load_model
from tests.kernels.sets import EMULATED, NATIVE, NEEDS_NATIVE, native
from tests.kernels.test_torch_set import normal
from tests.kernels.views import PAGE, tables, view
from tests.models.paged import PagedRun
from tests.models.tiny_llama import TINIES, make_reference

pytestmark = NEEDS_NATIVE
EACH = pytest.mark.parametrize(("dtype", "path"), NATIVE + EMULATED)
TINY = 1e-39
"""Values about this size are subnormal in float32 and in bfloat16."""


def subnormal(*shape: int, seed: int = 0, dtype: torch.dtype) -> Tensor:
    """Subnormal values.  In bfloat16 they are cut from float32, bit by bit: instructions that round make them zero."""
    values = normal(*shape, seed=seed) * TINY
    if dtype is torch.float32:
        return values
    return (values.view(torch.int32) >> 16).to(torch.int16).view(dtype)


def mixed(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Ordinary values, every other one of them subnormal."""
    values = normal(*shape, seed=seed, dtype=dtype)
    values[..., ::2] = subnormal(*shape, seed=seed, dtype=dtype)[..., ::2]
    return values


def attended(kernels: NativeKernels, entries: list[Tensor], query: Tensor) -> Tensor:
    """Attention of two rows over keys and values that are appended before."""
    rows, group = [range(70), range(3)], GroupKey(CacheKind.PAGED)
    batch = view(rows, tables([row.stop for row in rows], torch.Generator().manual_seed(1)), group)
    specs = [CacheSpec(name=name, kind=CacheKind.PAGED, shape=(1, 16), dtype=kernels.kv_dtype) for name in "kv"]
    caches = [kernels.allocate(spec, 8, PAGE) for spec in specs]
    for spec, cache, values in zip(specs, caches, entries, strict=True):
        kernels.append(cache, values, spec, batch)
    return kernels.attention(query, *zip(specs, caches, strict=True), batch, 0.25)


def operations(kernels: NativeKernels) -> Callable[[], dict[str, Tensor]]:
    """Each kind of operation on subnormal values; its arguments are made now."""
    dtype = kernels.dtype
    x, half = subnormal(90, 64, dtype=dtype), torch.full((90, 32), 0.5)
    weight, scale = kernels.pack([normal(96, 64, seed=1)]), normal(64, seed=2, dtype=dtype)
    entries, query = [mixed(73, 1, 16, seed=i, dtype=dtype) for i in (1, 2)], normal(73, 2, 16, dtype=dtype)
    return lambda: {
        "linear": kernels.linear(x, weight), "head": kernels.head(x, weight), "swiglu": kernels.swiglu(x),
        "norm": kernels.rms_norm(x, scale, 1e-5), "rope": kernels.rope(x[:, None], half, half),
        "attention": attended(kernels, entries, query)}


def bits(found: dict[str, Tensor]) -> dict[str, bytes]:
    """What was found to the last bit."""
    return {name: result.contiguous().view(torch.uint8).numpy().tobytes() for name, result in found.items()}


@EACH
@pytest.mark.parametrize("kv_dtype", [None, torch.int8], ids=["", "int8"])
def test_the_callers_float_state_changes_no_bit(dtype: torch.dtype, path: str, kv_dtype: torch.dtype | None) -> None:
    """A caller that flushes subnormal numbers to zero gets the bits of one that does not, on one thread and on several
    that begin in such a call, and still flushes afterwards."""
    expected = operations(native(dtype, path, kv_dtype=kv_dtype))()
    tiny = torch.tensor([TINY])
    for threads in (1, 2, 3):
        run = operations(native(dtype, path, threads, kv_dtype=kv_dtype))
        assert torch.set_flush_denormal(True)
        try:
            found, still = run(), tiny * 1.0
        finally:
            torch.set_flush_denormal(False)
        assert bits(found) == bits(expected)
        assert still.item() == 0


@pytest.mark.parametrize(("dtype", "path"), [one for one in NATIVE if one[1] in ("avx2", "avx512")])
def test_the_comparison_is_of_subnormal_results(dtype: torch.dtype, path: str) -> None:
    """Where float32 adds up, products of subnormal values are such values; other units take them for zeros always."""
    found = operations(native(dtype, path))()
    assert 0 < found["head"].abs().max() < 1e-36


@pytest.mark.parametrize(("dtype", "path"), NATIVE)
def test_a_pass_over_no_tokens_gives_no_scores(dtype: torch.dtype, path: str, tmp_path: Path) -> None:
    """Nothing is computed and no page is written; the next pass is as if there had been none."""
    make_reference(TINIES["plain"], tmp_path / "model")
    kernels = native(dtype, path, 2)
    model = load_model(tmp_path / "model", kernels)
    run = PagedRun(model, kernels, page_tokens=PAGE)
    batch = run.view([("a", [5, 6, 7])], torch.arange(3))
    before = [cache.clone() for layer in run.caches for cache in layer.values()]
    found = model.forward(replace(
        batch, token_ids_T=batch.token_ids_T[:0], positions_T=batch.positions_T[:0], row_T=batch.row_T[:0],
        offsets_R1=torch.zeros(1, dtype=torch.int64), wanted_W=batch.wanted_W[:0], whole_W=batch.whole_W[:0],
        page_tables={group: table[:0] for group, table in batch.page_tables.items()}))
    assert found.logits_LV.shape == (0, model.vocab_size)
    caches = [cache for layer in run.caches for cache in layer.values()]
    assert all(torch.equal(old, new) for old, new in zip(before, caches, strict=True))
    fresh = PagedRun(model, kernels, page_tokens=PAGE).forward(("a", [5, 6, 7]), every=True)
    assert torch.equal(model.forward(batch).logits_LV, fresh)


@pytest.mark.parametrize("scale", [0.0, -0.25, float("nan")])
def test_scores_are_scaled_by_a_number_above_zero(scale: float) -> None:
    """Shares are found by the greatest score before it is scaled: any other number is refused by its value."""
    dtype, path = NATIVE[0]
    kernels = native(dtype, path)
    spec = CacheSpec(name="k", kind=CacheKind.PAGED, shape=(1, 16), dtype=dtype)
    batch = view([range(1)], tables([1], torch.Generator().manual_seed(1)), spec.group)
    caches = [(replace(spec, name=name), kernels.allocate(spec, 2, PAGE)) for name in "kv"]
    with pytest.raises(ValueError, match=f"a number above 0, not by {scale}"):
        kernels.attention(normal(1, 2, 16, dtype=dtype), *caches, batch, scale)
