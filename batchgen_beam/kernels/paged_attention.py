"""Attention over KV pages in which every token is its own row.

Prefill, decode and re-prefill of a token give the same bits: all of them run the same fixed-shape products, one per
(query block, KV head, page).  Scores of all pages first, their exact maximum (a maximum has no order), weights
`exp(score - maximum)` in float32, then page sums added one page after another from +0.  A page that a token can't
see, or that only pads the batch, adds exact zeros.  Inside everything is float32; storage may be narrower.

A query block is `QUERY_BLOCK` consecutive tokens of one row, which share the gathered pages; short blocks are padded.
Does not know layers, sequences or who owns a page.

Shape suffixes: T tokens, N query blocks, Q tokens of a block, C pages of a slab, P pages of a block, G KV heads,
H query heads, M = Q * H / G query lines of a KV head, S tokens of a page, d head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen_beam.models.interface import BatchView, CacheSpec

__all__ = ["QUERY_BLOCK", "append_to_pages", "paged_attention"]

QUERY_BLOCK = 8
SLAB_ELEMENTS = 1 << 20
"""Float32 entries gathered at once (4 MiB): the gathered copy should still be in cache when it is multiplied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blocks:
    """Query blocks of equal work: which tokens, and which pages they read.

    tokens_NQ   index into T of each line, padding repeats the block's first token
    valid_NQ    False for padding
    pages_PN    page ids from the block's first visible page on, 0 beyond its last
    key_start_N position of the first key of the first page
    """

    tokens_NQ: Tensor
    valid_NQ: Tensor
    pages_PN: Tensor
    key_start_N: Tensor


def append_to_pages(cache: Tensor, values_TGd: Tensor, table_RP: Tensor, view: BatchView) -> None:
    """Write `values` at each token's place: page `table[row, position // S]`, slot `position % S`.

    `cache` is [pages, G, S, d].
    """
    page_tokens = cache.shape[2]
    pages_T = table_RP[view.row_T, view.positions_T // page_tokens]
    cache[pages_T, :, view.positions_T % page_tokens] = values_TGd.to(cache.dtype)


def paged_attention(q_THd: Tensor, keys: tuple[CacheSpec, Tensor], values: tuple[CacheSpec, Tensor],
                    view: BatchView, scale: float) -> Tensor:
    """Softmax attention of each token over its row's visible keys, [T, H, d] in the query's dtype."""
    (spec, key_cache), (_, value_cache) = keys, values
    tokens, heads, _ = q_THd.shape
    out_THd = q_THd.new_empty(tokens, heads, value_cache.shape[3])
    if tokens == 0:
        return out_THd
    table_RP = view.page_tables[spec.group]
    page_elements = key_cache[0].numel()
    for blocks in _plan(view, table_RP, key_cache.shape[2], spec.window, page_elements):
        q_NQHd = q_THd[blocks.tokens_NQ].float() * scale
        positions_NQ = view.positions_T[blocks.tokens_NQ]
        o_NQHd = _attend(q_NQHd, positions_NQ, blocks, key_cache, value_cache, spec.window)
        out_THd[blocks.tokens_NQ[blocks.valid_NQ]] = o_NQHd[blocks.valid_NQ].to(out_THd.dtype)
    return out_THd


def _plan(view: BatchView, table_RP: Tensor, page_tokens: int, window: int | None,
          page_elements: int) -> Iterator[_Blocks]:
    """All tokens as query blocks, longest first, in groups whose gathered pages fit the slab."""
    lengths_R = view.offsets_R1[1:] - view.offsets_R1[:-1]
    blocks_R = (lengths_R + QUERY_BLOCK - 1) // QUERY_BLOCK
    row_N = torch.repeat_interleave(blocks_R)
    first_block_R = torch.cumsum(blocks_R, 0) - blocks_R
    index_N = torch.arange(row_N.shape[0], device=row_N.device) - first_block_R[row_N]
    start_N = view.offsets_R1[row_N] + index_N * QUERY_BLOCK
    count_N = torch.clamp(view.offsets_R1[row_N + 1] - start_N, max=QUERY_BLOCK)
    first_N = view.positions_T[start_N]
    first_page_N = torch.zeros_like(first_N) if window is None else torch.clamp(first_N - window + 1, min=0) // page_tokens
    pages_N = (first_N + count_N - 1) // page_tokens + 1 - first_page_N
    order_N = torch.argsort(pages_N, descending=True, stable=True)
    offsets_Q = torch.arange(QUERY_BLOCK, device=row_N.device)
    sizes = pages_N[order_N].tolist()
    begin = 0
    while begin < len(sizes):
        width = sizes[begin]
        end = begin + max(1, SLAB_ELEMENTS // (width * page_elements))
        chosen = order_N[begin:end]
        valid_NQ = offsets_Q < count_N[chosen, None]
        steps_P = torch.arange(width, device=row_N.device)[:, None]
        columns_PN = torch.clamp(first_page_N[chosen] + steps_P, max=table_RP.shape[1] - 1)
        pages_PN = torch.where(steps_P < pages_N[chosen], table_RP[row_N[chosen], columns_PN], 0)
        yield _Blocks(tokens_NQ=start_N[chosen, None] + offsets_Q * valid_NQ, valid_NQ=valid_NQ, pages_PN=pages_PN,
                      key_start_N=first_page_N[chosen] * page_tokens)
        begin = end


def _attend(q_NQHd: Tensor, positions_NQ: Tensor, blocks: _Blocks, key_cache: Tensor, value_cache: Tensor,
            window: int | None) -> Tensor:
    """Attention of query blocks over their pages, float32 [N, Q, H, d]."""
    n, q, heads, d = q_NQHd.shape
    _, g, s, _ = key_cache.shape
    p = blocks.pages_PN.shape[0]
    lines = q_NQHd.view(n, q, g, heads // g, d).permute(0, 2, 1, 3, 4).reshape(n * g, q * heads // g, d)
    scores = lines.new_empty(p, n * g, lines.shape[1], s)
    slab = max(1, SLAB_ELEMENTS // (n * g * s * d))
    for start in range(0, p, slab):
        k = _gather(key_cache, blocks.pages_PN[start : start + slab]).transpose(2, 3)
        for i in range(k.shape[0]):
            torch.bmm(lines, k[i], out=scores[start + i])
    hidden = _hidden(positions_NQ, blocks.key_start_N, p, s, window)
    scores.view(p, n, g, q, heads // g, s).masked_fill_(hidden[:, :, None, :, None, :], -torch.inf)
    weights = scores.sub_(scores.amax((0, 3), keepdim=True)).exp_()
    sums = weights.sum(-1)
    total = torch.zeros_like(sums[0])
    mixed = lines.new_zeros(n * g, lines.shape[1], value_cache.shape[3])
    for start in range(0, p, slab):
        v = _gather(value_cache, blocks.pages_PN[start : start + slab])
        for i in range(v.shape[0]):
            mixed.baddbmm_(weights[start + i], v[i])
            total += sums[start + i]
    mixed /= total[:, :, None]
    return mixed.view(n, g, q, heads // g, -1).permute(0, 2, 1, 3, 4).reshape(n, q, heads, -1)


def _gather(cache: Tensor, pages_CN: Tensor) -> Tensor:
    """Pages as float32 [C, N * G, S, d]."""
    c, n = pages_CN.shape
    _, g, s, d = cache.shape
    return cache.index_select(0, pages_CN.reshape(-1)).float().view(c, n * g, s, d)


def _hidden(positions_NQ: Tensor, key_start_N: Tensor, pages: int, page_tokens: int, window: int | None) -> Tensor:
    """[P, N, Q, S]: True where the key is after the query or behind its window."""
    offsets_PS = torch.arange(pages * page_tokens, device=positions_NQ.device).view(pages, page_tokens)
    keys_PNS = key_start_N[None, :, None] + offsets_PS[:, None, :]
    distance = positions_NQ[None, :, :, None] - keys_PNS[:, :, None, :]
    return distance < 0 if window is None else (distance < 0) | (distance >= window)
