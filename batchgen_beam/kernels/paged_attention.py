"""Attention over KV pages in which every token is its own row.

Prefill, decode and re-prefill of a token give the same bits: all of them run the same fixed-shape products, one per
(query block, KV head, page), and a softmax per page.  Pages are then merged as in online softmax (Milakov and
Gimelshein 2018, "Online normalizer calculation for softmax", section 3), except that the exact maximum over all pages
is known first (a maximum has no order), so that each page has one weight; page results are added one page after another
from +0.  A page that a token can't see, or that only pads the batch, has weight +0 and changes no bit.
Inside everything is float32; storage may be narrower, and pages of int8 are widened when they are gathered.

A query block is a fixed number of consecutive tokens of one row, which share the gathered pages; short blocks are
padded.  A sink is one more score of a head, whose value is 0: it only adds to the sum that weights are divided by.
Does not know layers, sequences or who owns a page.

Shape suffixes: T tokens, R rows, N query blocks, Q tokens of a block, P pages of a block, C pages of a slab,
G KV heads, B = N * G products, H query heads, M = Q * H / G query lines of a KV head, S tokens of a page, d head size,
v size of a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen_beam.kernels.int8_pages import quantise, split_pages
from batchgen_beam.models.interface import BatchView, CacheSpec

__all__ = ["QUERY_LINES", "Workspace", "append_entries", "paged_attention", "query_block"]

SLAB_ELEMENTS = 1 << 19
"""Float32 entries of gathered pages at once (2 MiB): the copy should still be in cache when it is multiplied."""

SCORE_ELEMENTS = 1 << 22
"""Float32 scores kept at once (16 MiB)."""

QUERY_LINES = 12
"""Query lines of one product.  More waste decode, fewer waste prefill: the balance measured on two AVX-512 machines."""

HIDDEN = -1e30
"""Score of a key that the query can't see.  Finite, since a page of nothing else must not become NaN; its softmax is
exactly 0 beside any visible key."""


def query_block(heads_per_group: int) -> int:
    """Tokens of one query block: a constant of the model, whatever the batch."""
    return max(1, QUERY_LINES // heads_per_group)


@dataclass(frozen=True, slots=True)
class _Cache:
    """Pages [pages, G, S, d] of one entry; of int8 with scales [pages, G, S, 1], for values that are then `dtype`."""

    pages: Tensor
    scales: Tensor | None
    dtype: torch.dtype

    @classmethod
    def of(cls, spec: CacheSpec, cache: Tensor, dtype: torch.dtype) -> _Cache:
        """The cache of a spec in a run of this dtype."""
        return cls(*split_pages(cache, spec.shape[1]), dtype) if spec.is_scaled else cls(cache, None, dtype)


class Workspace:
    """Owns the buffers that pages are gathered into: allocating them anew for every slab costs more page faults than
    the gather itself takes.  Belongs to one kernel set, so to one thread at a time."""

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, Tensor] = {}

    def gather(self, cache: _Cache, ids: Tensor) -> Tensor:
        """Pages `ids` in float32, valid until the next call."""
        stored, count = cache.pages, ids.shape[0]
        pages = self._buffer(stored.dtype, count, stored)
        torch.index_select(stored, 0, ids, out=pages)
        if stored.dtype is torch.float32:
            return pages
        wide = self._buffer(torch.float32, count, stored).copy_(pages)
        if cache.scales is None:
            return wide
        wide *= cache.scales.index_select(0, ids)
        if cache.dtype is torch.float32:
            return wide
        return wide.copy_(self._buffer(cache.dtype, count, stored).copy_(wide))

    def _buffer(self, dtype: torch.dtype, count: int, cache: Tensor) -> Tensor:
        elements = count * cache[0].numel()
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.numel() < elements or buffer.device != cache.device:
            buffer = torch.empty(max(elements, SLAB_ELEMENTS), dtype=dtype, device=cache.device)
            self._buffers[dtype] = buffer
        return buffer[:elements].view(count, *cache.shape[1:])


def append_entries(cache: Tensor, values_TGd: Tensor, spec: CacheSpec, view: BatchView) -> None:
    """Write `values` at each token's place: page `table[row, position // S]`, slot `position % S`.

    `cache` is [pages, G, S, d], or of int8 pages.
    """
    table_RP = view.page_tables[spec.group]
    if spec.is_scaled:
        for part, entries in zip(split_pages(cache, spec.shape[1]), quantise(values_TGd), strict=True):
            _append(part, entries, table_RP, view)
    else:
        _append(cache, values_TGd, table_RP, view)


def _append(cache: Tensor, values_TGd: Tensor, table_RP: Tensor, view: BatchView) -> None:
    page_tokens = cache.shape[2]
    pages_T = table_RP[view.row_T, view.positions_T // page_tokens]
    cache[pages_T, :, view.positions_T % page_tokens] = values_TGd.to(cache.dtype)


def paged_attention(q_THd: Tensor, keys: tuple[CacheSpec, Tensor], values: tuple[CacheSpec, Tensor], view: BatchView,
                    scale: float, workspace: Workspace, sinks_H: Tensor | None = None) -> Tensor:
    """Softmax attention of each token over its row's visible keys, [T, H, v] in the query's dtype.

    Values out of the keys' own cache are the first of each entry, as many as their spec says.
    """
    spec, tokens, heads = keys[0], *q_THd.shape[:2]
    size = values[0].shape[1]
    key_cache, value_cache = (_Cache.of(spec if cache is keys[1] else own, cache, q_THd.dtype)
                              for own, cache in (keys, values))
    out_THv = q_THd.new_empty(tokens, heads, size)
    if tokens == 0:
        return out_THv
    for group in _groups(view, spec, heads, key_cache.pages):
        q_NQHd = q_THd[group.tokens_NQ].float() * scale
        o_NQHv = _attend(q_NQHd, group, key_cache, value_cache, workspace, size, sinks_H)
        out_THv[group.tokens_NQ[group.valid_NQ]] = o_NQHv[group.valid_NQ].to(out_THv.dtype)
    return out_THv


def _groups(view: BatchView, spec: CacheSpec, heads: int, cache: Tensor) -> list[_Group]:
    """The batch's query blocks in groups: the same for all layers of a cache group and shape, so worked out once."""
    _, kv_heads, page_tokens, _ = cache.shape
    block = query_block(heads // kv_heads)
    key = (spec.group, heads, tuple(cache.shape[1:]))
    if key not in view.notes:
        most_blocks = SLAB_ELEMENTS // cache[0].numel()
        most_pairs = SCORE_ELEMENTS // (block * heads * page_tokens)
        blocks = _cut(view, page_tokens, spec.window, block)
        view.notes[key] = list(blocks.groups(view, spec, most_blocks, most_pairs))
    groups: list[_Group] = view.notes[key]
    return groups


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Query blocks that run together, most pages first.

    tokens_NQ   index into T of each line; padding repeats the block's first token
    valid_NQ    False for padding
    pages_PN    page ids from the block's first visible page on, 0 beyond its last
    active      for each page, how many blocks have it
    open_pages  leading pages that every token sees whole
    hidden      [P - open, N, Q, S]: True where the key is after the query or behind its window
    """

    tokens_NQ: Tensor
    valid_NQ: Tensor
    pages_PN: Tensor
    active: list[int]
    open_pages: int
    hidden: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blocks:
    """All tokens of a view as query blocks, most pages first; `block` is Q.

    Per block: its row, index into T of its first token, number of tokens, first visible page, number of pages from
    there, and number of those that its first token sees whole.
    """

    block: int
    page_tokens: int
    row_N: Tensor
    start_N: Tensor
    count_N: Tensor
    first_page_N: Tensor
    pages_N: Tensor
    open_N: Tensor

    def groups(self, view: BatchView, spec: CacheSpec, most_blocks: int, most_pairs: int) -> Iterator[_Group]:
        """Groups within both bounds (blocks, and blocks times pages; but at least one block), none padded to over
        twice its work."""
        pages, opened = self.pages_N.tolist(), self.open_N.tolist()
        begin = 0
        while begin < len(pages):
            width = pages[begin]
            end = begin + 1
            last = min(len(pages), begin + max(1, min(most_blocks, most_pairs // width)))
            while end < last and 2 * pages[end] >= width:
                end += 1
            active = [sum(n > page for n in pages[begin:end]) for page in range(width)]
            yield self._group(slice(begin, end), view, spec, active, min(opened[begin:end]))
            begin = end

    def _group(self, part: slice, view: BatchView, spec: CacheSpec, active: list[int], open_pages: int) -> _Group:
        table_RP = view.page_tables[spec.group]
        offsets_Q = torch.arange(self.block, device=table_RP.device)
        valid_NQ = offsets_Q < self.count_N[part, None]
        steps_P = torch.arange(len(active), device=table_RP.device)[:, None]
        columns_PN = torch.clamp(self.first_page_N[part] + steps_P, max=table_RP.shape[1] - 1)
        pages_PN = torch.where(steps_P < self.pages_N[part], table_RP[self.row_N[part], columns_PN], 0)
        tokens_NQ = self.start_N[part, None] + offsets_Q * valid_NQ
        queries_NQ = view.positions_T[tokens_NQ] - self.first_page_N[part, None] * self.page_tokens
        return _Group(tokens_NQ=tokens_NQ, valid_NQ=valid_NQ, pages_PN=pages_PN, active=active, open_pages=open_pages,
                      hidden=self._hidden(queries_NQ, open_pages, len(active), spec.window))

    def _hidden(self, queries_NQ: Tensor, open_pages: int, pages: int, window: int | None) -> Tensor:
        """Which keys of the pages after the open ones a query can't see; `queries_NQ` count from the first page."""
        first, end = open_pages * self.page_tokens, pages * self.page_tokens
        keys = torch.arange(first, end, device=queries_NQ.device).view(-1, 1, 1, self.page_tokens)
        distance = queries_NQ[None, :, :, None] - keys
        return distance < 0 if window is None else (distance < 0) | (distance >= window)


def _cut(view: BatchView, page_tokens: int, window: int | None, block: int) -> _Blocks:
    """The view's tokens in blocks of `block` consecutive tokens of one row, counted from the row's first token."""
    lengths_R = view.offsets_R1[1:] - view.offsets_R1[:-1]
    blocks_R = (lengths_R + block - 1) // block
    row_N = torch.repeat_interleave(blocks_R)
    index_N = torch.arange(row_N.shape[0], device=row_N.device) - (torch.cumsum(blocks_R, 0) - blocks_R)[row_N]
    start_N = view.offsets_R1[row_N] + index_N * block
    count_N = torch.clamp(view.offsets_R1[row_N + 1] - start_N, max=block)
    first_N = view.positions_T[start_N]
    if window is None:
        first_page_N, open_N = torch.zeros_like(first_N), (first_N + 1) // page_tokens
    else:
        first_page_N, open_N = torch.clamp(first_N - window + 1, min=0) // page_tokens, torch.zeros_like(first_N)
    pages_N = (first_N + count_N - 1) // page_tokens + 1 - first_page_N
    order_N = torch.argsort(pages_N, descending=True, stable=True)
    return _Blocks(block=block, page_tokens=page_tokens, row_N=row_N[order_N], start_N=start_N[order_N],
                   count_N=count_N[order_N], first_page_N=first_page_N[order_N], pages_N=pages_N[order_N],
                   open_N=open_N[order_N])


def _attend(q_NQHd: Tensor, group: _Group, key_cache: _Cache, value_cache: _Cache, workspace: Workspace, size: int,
            sinks_H: Tensor | None) -> Tensor:
    """Attention of query blocks over their pages, float32 [N, Q, H, v]."""
    n, q, heads, d = q_NQHd.shape
    g = key_cache.pages.shape[1]
    lines_BMd = q_NQHd.view(n, q, g, heads // g, d).permute(0, 2, 1, 3, 4).reshape(n * g, q * heads // g, d)
    scores_PBMS = _scores(lines_BMd, group, key_cache, workspace)
    partly = scores_PBMS[group.open_pages :].view(-1, n, g, q, heads // g, scores_PBMS.shape[-1])
    partly.masked_fill_(group.hidden[:, :, None, :, None, :], HIDDEN)
    peaks_PBM = scores_PBMS.amax(-1)
    shares_PBMS = torch.softmax(scores_PBMS, -1)
    peaks_PBM.masked_fill_(peaks_PBM <= HIDDEN, -torch.inf)
    if sinks_H is None:
        peak_BM = peaks_PBM.amax(0)
        total_BM = torch.zeros_like(peak_BM)
    else:
        sinks_BM = sinks_H.view(1, g, 1, heads // g).expand(n, g, q, heads // g).reshape(n * g, -1)
        peak_BM = torch.maximum(peaks_PBM.amax(0), sinks_BM)
        total_BM = torch.exp(sinks_BM - peak_BM)
    weights_PBM = torch.exp(peaks_PBM - peak_BM)
    weights_PBM /= shares_PBMS.amax(-1)
    shares_PBMS *= weights_PBM[..., None]
    for weight_BM in weights_PBM:
        total_BM += weight_BM
    mixed_BMv = _mix(shares_PBMS, group, value_cache, workspace, size) / total_BM[..., None]
    return mixed_BMv.view(n, g, q, heads // g, -1).permute(0, 2, 1, 3, 4).reshape(n, q, heads, -1)


def _scores(lines_BMd: Tensor, group: _Group, key_cache: _Cache, workspace: Workspace) -> Tensor:
    """Query times key for every page, [P, B, M, S]; undefined where a block does not have the page."""
    pages, (products, lines, _) = len(group.active), lines_BMd.shape
    scores_PBMS = lines_BMd.new_empty(pages, products, lines, key_cache.pages.shape[2])
    for page, keys_BSd in _gathered(key_cache, group, workspace):
        have = keys_BSd.shape[0]
        torch.bmm(lines_BMd[:have], keys_BSd.transpose(1, 2), out=scores_PBMS[page, :have])
    return scores_PBMS


def _mix(shares_PBMS: Tensor, group: _Group, value_cache: _Cache, workspace: Workspace, size: int) -> Tensor:
    """Sum over pages, in page order, of weighted values, the first `size` of each entry, [B, M, v].

    Slots beyond a row's last token may hold what an earlier owner of the page left; a non-finite value there would
    survive its zero weight, so such slots are cleared when there is one.
    """
    _, products, lines, _ = shares_PBMS.shape
    mixed_BMv = shares_PBMS.new_zeros(products, lines, size)
    for page, entries_BSd in _gathered(value_cache, group, workspace):
        have, values_BSv = entries_BSd.shape[0], entries_BSd[..., :size]
        if page >= group.open_pages and not torch.isfinite(values_BSv.sum()):
            unseen_NS = group.hidden[page - group.open_pages, : group.active[page]].all(1)
            values_NGSv = values_BSv.unflatten(0, (len(unseen_NS), -1))
            values_NGSv.masked_fill_(unseen_NS[:, None, :, None], 0.0)
        mixed_BMv[:have].baddbmm_(shares_PBMS[page, :have], values_BSv)
    return mixed_BMv


def _gathered(cache: _Cache, group: _Group, workspace: Workspace) -> Iterator[tuple[int, Tensor]]:
    """Page after page of all blocks that have it: (page index, float32 [B, S, d])."""
    _, g, s, d = cache.pages.shape
    page = 0
    while page < len(group.active):
        have = group.active[page]
        ids_CN = group.pages_PN[page : page + max(1, SLAB_ELEMENTS // (have * g * s * d)), :have]
        slab_CBSd = workspace.gather(cache, ids_CN.reshape(-1)).view(ids_CN.shape[0], have * g, s, d)
        for keys_BSd in slab_CBSd:
            yield page, keys_BSd[: group.active[page] * g]
            page += 1
