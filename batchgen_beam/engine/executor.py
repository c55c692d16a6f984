"""The only module that moves tensors: caches of both tiers, page copies, and the forward pass of a packed batch.

Applies what was decided and decides nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchgen_beam.engine.batch import PackedBatch
from batchgen_beam.engine.budget import PageBudget
from batchgen_beam.engine.kv_pool import PageCopy
from batchgen_beam.engine.primitives import WHOLE, SubBatching, combined_forward
from batchgen_beam.models.caches import GroupKey
from batchgen_beam.models.interface import BatchView, KernelSet, Model, Scores
from batchgen_beam.settings import PAGE_TOKENS

__all__ = ["Executor", "MakeExecutor"]

Caches = list[dict[str, Tensor]]


class Executor:
    """A model, its kernel set, and the cache tensors on the device and the host."""

    def __init__(self, model: Model, kernels: KernelSet, budget: PageBudget,
                 sub_batching: SubBatching = WHOLE) -> None:
        self._model = model
        self._sub_batching = sub_batching
        self._device = kernels.device
        self._zeroes = kernels.wants_zero_pages
        self._groups = [{spec.name: spec.group for spec in layer.cache_spec()} for layer in model.layers]
        self._caches = self._allocate(kernels, budget.device)
        self._host = [{name: cache.cpu() for name, cache in layer.items()}
                      for layer in self._allocate(kernels, budget.host)]
        self.forward_calls = 0

    def _allocate(self, kernels: KernelSet, counts: Mapping[GroupKey, int]) -> Caches:
        return [{spec.name: kernels.allocate(spec, counts[spec.group], PAGE_TOKENS) for spec in layer.cache_spec()}
                for layer in self._model.layers]

    def clear(self, group: GroupKey, pages: Sequence[int]) -> None:
        """Zero pages before a sequence uses them, so that positions not yet written add exact zeros."""
        if pages and self._zeroes:
            index = torch.tensor(pages, device=self._device)
            for cache, _ in self._entries(group):
                cache.index_fill_(0, index, 0)

    def copy(self, copies: Iterable[PageCopy], *, to_host: bool) -> None:
        """Move page contents between the tiers, in all layers."""
        by_group: defaultdict[GroupKey, list[PageCopy]] = defaultdict(list)
        for copy in copies:
            by_group[copy.group].append(copy)
        for group, moves in by_group.items():
            sources = torch.tensor([move.source for move in moves])
            targets = torch.tensor([move.target for move in moves])
            for cache, host in self._entries(group):
                source, target = (cache, host) if to_host else (host, cache)
                target[targets.to(target.device)] = source[sources.to(source.device)].to(target.device)

    def _entries(self, group: GroupKey) -> Iterator[tuple[Tensor, Tensor]]:
        for names, caches, host in zip(self._groups, self._caches, self._host, strict=True):
            for name, key in names.items():
                if key == group:
                    yield caches[name], host[name]

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, whole_W: NDArray[np.bool_], eligible: int) -> Scores:
        """What the wanted tokens come to; `whole_W` and `eligible` as in `BatchView`."""
        self.forward_calls += 1
        view = BatchView(
            token_ids_T=self._put(batch.token_ids_T),
            positions_T=self._put(batch.positions_T),
            row_T=self._put(batch.row_T),
            offsets_R1=self._put(batch.offsets_R1),
            wanted_W=self._put(batch.wanted_W),
            whole_W=whole_W,
            eligible=eligible,
            page_tables={group: self._put(table) for group, table in batch.page_tables.items()},
            state_slots_R=self._put(batch.state_slots_R),
            caches=self._caches,
        )
        if self._sub_batching.is_whole:
            return self._model.forward(view)
        return combined_forward(self._model, view, self._sub_batching)

    def _put(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


MakeExecutor = Callable[[Model, KernelSet, PageBudget, SubBatching], Executor]
"""How an engine gets its executor."""
