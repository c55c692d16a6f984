"""KV entries as int8: the values of one token's head are whole multiples of one float32 scale.

The scale is the head's greatest magnitude / 127, fixed when the entry is appended; multiples are rounded to nearest,
ties to even.  Values that are not finite make the scale not-a-number, and so all values of that token's head: nothing
that is broken is read back as a number.  Reading gives multiple * scale, rounded once to the run's dtype.

Owns the rounding, for tensors, and what a page takes.  A page of one head is its multiples and then the scale of each
token, in one tensor, so that whoever copies or clears pages need not know.

Shape suffixes: T tokens, P pages, G KV heads, S tokens of a page, d head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from batchgen_beam.models.interface import CacheKind, CacheSpec

__all__ = ["Quantised", "check_kv_dtype", "kv_facts", "page_shape", "quantise", "split_pages", "widen"]

GREATEST = 127

SCALE_BYTES = torch.float32.itemsize


class Quantised(NamedTuple):
    """Multiples, int8 [..., d], and the scale of each line of them, float32 [..., 1]."""

    multiples: Tensor
    scales: Tensor


def check_kv_dtype(dtype: torch.dtype, kv_dtype: torch.dtype | None) -> torch.dtype:
    """What keys and values are kept in by a set that computes in `dtype`; `ValueError` for what it can't be."""
    if kv_dtype not in (None, dtype, torch.int8):
        raise ValueError(f"keys and values are kept in {dtype} or int8 here, not in {kv_dtype}")
    return kv_dtype or dtype


def kv_facts(dtype: torch.dtype, kv_dtype: torch.dtype) -> Mapping[str, object]:
    """What the print of a set says of its keys and values: nothing where they are kept in the set's own dtype."""
    return {} if kv_dtype is dtype else {"kv_dtype": str(kv_dtype).removeprefix("torch.")}


def page_shape(spec: CacheSpec, page_tokens: int) -> tuple[int, ...]:
    """Of one page (one state slot) in items of the spec's dtype."""
    if spec.kind is CacheKind.STATE:
        return spec.shape
    heads, size = spec.shape
    return (heads, page_tokens * (size + SCALE_BYTES)) if spec.is_scaled else (heads, page_tokens, size)


def split_pages(cache: Tensor, size: int) -> Quantised:
    """Views of a cache of int8 pages whose heads have `size` values: [P, G, S, d] and [P, G, S, 1]."""
    page_tokens = cache.shape[-1] // (size + SCALE_BYTES)
    multiples, scales = cache.split((page_tokens * size, page_tokens * SCALE_BYTES), -1)
    return Quantised(multiples.unflatten(-1, (page_tokens, size)), scales.view(torch.float32).unsqueeze(-1))


def quantise(values: Tensor) -> Quantised:
    """The nearest multiples of each line's own scale; `values` are [..., d] of any float dtype."""
    values = values.float()
    peaks = values.abs().amax(-1, keepdim=True)
    scales = torch.where(peaks.isfinite(), peaks / GREATEST, torch.nan)
    multiples = torch.where(scales > 0, values / scales, 0.0).round().clamp(-GREATEST, GREATEST)
    return Quantised(multiples.to(torch.int8), scales)


def widen(found: Quantised, dtype: torch.dtype) -> Tensor:
    """What was kept, rounded once to `dtype`."""
    return (found.multiples.float() * found.scales).to(dtype)
