"""PARTITION: one process's part of a kernel set's work, with the results of all processes gathered.

Owns who has what: each product's output columns and each cache's key/value heads (with their query heads) are dealt
over the processes in ranges.  A process has whole inputs, computes whole sums for its own columns and heads, and gets
the others' by gathering; no sum is ever split, so every process holds the bits of one process alone.  Experts take two
gatherings, however many are chosen: their intermediates before `down`, and the layer's result.  What is too small to
deal, and what goes line by line (norms, rotations), every process computes by itself.  Does not know models, or how
processes meet.

The promise rests on the inner set's: a column's bits must not depend on the columns beside it.

Shape suffixes as in `models.interface`; A = T * k assignments of tokens to experts, I an expert's intermediate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchgen_beam.kernels.expert_batches import ExpertBatch, add_up, by_expert
from batchgen_beam.kernels.process_group import Gathering
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.dense import DenseDecoder
from batchgen_beam.models.experts import SILU, Activation, Expert, Routing
from batchgen_beam.models.interface import BatchView, CacheKind, CacheSpec, KernelSet, PackedWeight, Scores
from batchgen_beam.models.sampling import Sampled, SamplingLines

__all__ = ["Columns", "PartitionedKernels", "deal"]

COLUMNS = 32
"""Output columns are dealt in multiples of this many: a panel of the native set, vectors of the torch set."""


def deal(count: int, size: int, unit: int = 1) -> list[int]:
    """Borders of `size` ranges over `count` things, in multiples of `unit` but for the end, as even as can be; [] if
    some range would be empty."""
    units = -(-count // unit)
    return [min(count, unit * (units * rank // size)) for rank in range(size + 1)] if units >= size else []


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """One process's columns of a packed product: the inner set's weight, and all processes' columns of each part."""

    weight: PackedWeight
    widths: tuple[tuple[int, ...], ...]

    @property
    def totals(self) -> list[int]:
        """Each process's columns of all parts."""
        return [sum(parts) for parts in self.widths]


class PartitionedKernels:
    """Implements `models.interface.KernelSet` for one process of several.

    All processes make the same calls in the same order.  `facts` are those of the inner set, since the bits are.
    """

    def __init__(self, inner: KernelSet, group: Gathering) -> None:
        self.name, self.dtype, self.kv_dtype, self.device = inner.name, inner.dtype, inner.kv_dtype, inner.device
        self.recompute, self.wants_zero_pages = inner.recompute, inner.wants_zero_pages
        self._inner = inner
        self._group = group

    @property
    def threads(self) -> int:
        """Of the inner set."""
        return self._inner.threads

    def facts(self) -> Mapping[str, object]:
        """Of the inner set."""
        return self._inner.facts()

    def seconds(self) -> Mapping[str, float]:
        """Nothing is fused."""
        return {}

    # Products

    def pack(self, weights: Sequence[Tensor], *, biases: Sequence[Tensor] | None = None) -> PackedWeight:
        """This process's columns of each part, or all of them where a part is too small."""
        borders = [deal(len(weight), self._group.size, COLUMNS) for weight in weights]
        if not all(borders):
            return self._inner.pack(weights, biases=biases)
        own = [slice(part[self._group.rank], part[self._group.rank + 1]) for part in borders]
        packed = self._inner.pack([weight[rows] for weight, rows in zip(weights, own, strict=True)],
                                  biases=None if biases is None else [bias[rows] for bias, rows
                                                                      in zip(biases, own, strict=True)])
        return Columns(weight=packed, widths=self._widths(borders))

    def pack_head(self, weight_VD: Tensor) -> PackedWeight:
        """This process's part of the vocabulary, or all of it: where it is too small, and for the native set, which
        finds the greatest and its log-probability as it goes, in an order that gathered logits do not have."""
        borders = deal(len(weight_VD), self._group.size, COLUMNS)
        if not borders or not isinstance(self._inner, TorchKernels):
            return self._inner.pack_head(weight_VD)
        own = slice(borders[self._group.rank], borders[self._group.rank + 1])
        return Columns(weight=self._inner.pack_head(weight_VD[own]), widths=self._widths([borders]))

    def _widths(self, borders: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(part[rank + 1] - part[rank] for part in borders) for rank in range(self._group.size))

    def linear(self, x_TK: Tensor, weight: PackedWeight) -> Tensor:
        """`x @ weight.T (+ bias)`, [T, N]."""
        if not isinstance(weight, Columns):
            return self._inner.linear(x_TK, weight)
        return self._gathered(self._inner.linear(x_TK, weight.weight), weight)

    def head(self, x_WD: Tensor, weight: PackedWeight) -> Tensor:
        """Float32 logits, [W, V]."""
        if not isinstance(weight, Columns):
            return self._inner.head(x_WD, weight)
        return self._gathered(self._inner.head(x_WD, weight.weight), weight)

    def scores(self, x_WD: Tensor, weight: PackedWeight, view: BatchView) -> Scores:
        """Of all wanted tokens, whole logits where the vocabulary is dealt: the greatest of a part is not the
        greatest."""
        if not isinstance(weight, Columns):
            return self._inner.scores(x_WD, weight, view)
        return Scores.whole(self.head(x_WD, weight))

    def _gathered(self, own_TW: Tensor, weight: Columns) -> Tensor:
        """All columns: the parts one after another, each in order of rank."""
        found = self._group.gather(own_TW, weight.totals)
        by_part = [part_TW.split(widths, 1) for part_TW, widths in zip(found, weight.widths, strict=True)]
        return torch.cat([pieces[part] for part in range(len(weight.widths[0])) for pieces in by_part], 1)

    # Experts

    def experts(self, x_TD: Tensor, routing: Routing, experts: Sequence[Expert], activation: Activation, *,
                shared_TD: Tensor | None = None) -> Tensor:
        """Weighted sum over each token's experts, [T, D]."""
        if not isinstance(self._inner, TorchKernels):
            raise ValueError(f"experts are dealt over processes on the torch kernel set, not on {self.name!r}; use "
                             f"--kernels=torch")
        batches = [(batch, experts[batch.expert]) for batch in by_expert(routing, len(experts))]
        if not batches:
            return add_up((), shared_TD, x_TD)
        inner_AI = self._intermediates(x_TD, batches, activation)
        down = batches[0][1].down
        parts = inner_AI.split([len(batch.tokens_N) for batch, _ in batches])
        if not isinstance(down, Columns):
            return add_up(((batch, self._inner.linear(part_NI, expert.down))
                           for (batch, expert), part_NI in zip(batches, parts, strict=True)), shared_TD, x_TD)
        begin = sum(down.totals[: self._group.rank])
        own = slice(begin, begin + down.totals[self._group.rank])
        own_TW = add_up(((batch, self._inner.linear(part_NI, expert.down.weight))
                         for (batch, expert), part_NI in zip(batches, parts, strict=True)),
                        None if shared_TD is None else shared_TD[:, own], x_TD[:, own])
        return self._gathered(own_TW, down)

    def _intermediates(self, x_TD: Tensor, batches: Sequence[tuple[ExpertBatch, Expert]],
                       activation: Activation) -> Tensor:
        """What goes into `down`, expert after expert, [A, I]."""
        first = batches[0][1].gate_up
        is_dealt = isinstance(first, Columns)
        own_AW = torch.cat([self._inner.swiglu(
            self._inner.linear(x_TD[batch.tokens_N], expert.gate_up.weight if is_dealt else expert.gate_up), activation)
            for batch, expert in batches])
        return torch.cat(self._group.gather(own_AW, [parts[0] for parts in first.widths]), 1) if is_dealt else own_AW

    # Attention

    def _heads(self, spec: CacheSpec) -> list[int]:
        """Borders of the key/value heads of each process; [] where every process has all."""
        return [] if spec.kind is CacheKind.STATE else deal(spec.shape[0], self._group.size)

    def _own(self, spec: CacheSpec) -> tuple[CacheSpec, slice]:
        """The entry that this process keeps, and which of its heads."""
        borders = self._heads(spec)
        if not borders:
            return spec, slice(None)
        own = slice(borders[self._group.rank], borders[self._group.rank + 1])
        return replace(spec, shape=(own.stop - own.start, *spec.shape[1:])), own

    def allocate(self, spec: CacheSpec, count: int, page_tokens: int) -> Tensor:
        """Pages of this process's heads alone."""
        return self._inner.allocate(self._own(spec)[0], count, page_tokens)

    def append(self, cache: Tensor, values_TGd: Tensor, spec: CacheSpec, view: BatchView) -> None:
        """Write this process's heads."""
        own, heads = self._own(spec)
        self._inner.append(cache, values_TGd[:, heads], own, view)

    def attention(self, q_THd: Tensor, keys: tuple[CacheSpec, Tensor], values: tuple[CacheSpec, Tensor],
                  view: BatchView, scale: float, *, sinks_H: Tensor | None = None) -> Tensor:
        """Attention of the query heads that belong to this process's key/value heads; the others' gathered."""
        borders = self._heads(keys[0])
        if not borders:
            return self._inner.attention(q_THd, keys, values, view, scale, sinks_H=sinks_H)
        a_group = q_THd.shape[1] // keys[0].shape[0]
        own = slice(a_group * borders[self._group.rank], a_group * borders[self._group.rank + 1])
        own_THv = self._inner.attention(
            q_THd[:, own], (self._own(keys[0])[0], keys[1]), (self._own(values[0])[0], values[1]), view, scale,
            sinks_H=None if sinks_H is None else sinks_H[own])
        size = own_THv.shape[2]
        widths = [a_group * (stop - start) * size for start, stop in pairwise(borders)]
        return torch.cat(self._group.gather(own_THv.flatten(1), widths), 1).view(len(q_THd), -1, size)

    # Line by line

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Root mean square norm."""
        return self._inner.rms_norm(x_TD, weight_D, eps)

    def rope(self, x_THd: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
        """Rotary embedding."""
        return self._inner.rope(x_THd, cos_Td, sin_Td)

    def swiglu(self, gate_up_TN: Tensor, activation: Activation = SILU) -> Tensor:
        """The gated activation."""
        return self._inner.swiglu(gate_up_TN, activation)

    def embed(self, table_VD: Tensor, token_ids_T: Tensor) -> Tensor:
        """Rows of the embedding table, which every process has."""
        return self._inner.embed(table_VD, token_ids_T)

    def sample(self, logits_LV: Tensor, lines: SamplingLines, uniform_L: NDArray[np.float64],
               text_vocabulary: int) -> Sampled:
        """The next token of each row."""
        return self._inner.sample(logits_LV, lines, uniform_L, text_vocabulary)

    def fuse(self, decoder: DenseDecoder) -> None:
        """A pass gathers between its operations."""
        del decoder
