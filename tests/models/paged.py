"""A hand-made page table around a model: forward passes over any mix of rows and chunks, without an engine.

Rows get their pages in a scattered order, so that nothing works by contiguity.  Windowed groups give back what lies
behind their window, and pages are filled with rubbish before they are handed out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from batchgen_beam.models.interface import BatchView, CacheKind, GroupKey, KernelSet, Model

RUBBISH = 77.0

Chunk = tuple[str, Sequence[int]]
"""Next tokens of a row."""


class PagedRun:
    """The caches of a model and the rows in them.  `forward` takes the rows' next tokens."""

    def __init__(self, model: Model, kernels: KernelSet, *, pages: int = 64, page_tokens: int = 8) -> None:
        self._model = model
        self._page_tokens = page_tokens
        specs = [layer.cache_spec() for layer in model.layers]
        self.caches: list[dict[str, Tensor]] = [
            {spec.name: kernels.allocate(spec, pages, page_tokens) for spec in layer} for layer in specs]
        self._groups = {spec.group for layer in specs for spec in layer}
        self._free = {group: _scattered(pages) for group in self._groups}
        for layer in self.caches:
            for cache in layer.values():
                cache[1:] = RUBBISH
        self.tables: dict[str, dict[GroupKey, list[int]]] = {}
        self.length: dict[str, int] = {}

    def forward(self, *chunks: Chunk, every: bool = False) -> Tensor:
        """Logits float32 of each chunk's last token [R, V], or of all tokens [T, V]."""
        ends = torch.tensor([len(ids) for _, ids in chunks]).cumsum(0)
        wanted = torch.arange(int(ends[-1])) if every else ends - 1
        return self._model.forward(self.view(chunks, wanted)).logits_LV.clone()

    def lose_keys(self, row: str, *, layer: int, page: int) -> None:
        """Zero a row's keys of one page in one layer."""
        for group, spec in ((spec.group, spec) for spec in self._model.layers[layer].cache_spec() if spec.name == "k"):
            self.caches[layer][spec.name][self.tables[row][group][page]] = 0

    def view(self, chunks: Sequence[Chunk], wanted_W: Tensor) -> BatchView:
        """The batch of the rows' next tokens, which get their pages now."""
        starts = []
        for row, ids in chunks:
            starts.append(self.length.get(row, 0))
            self._extend(row, starts[-1], len(ids))
        lengths = torch.tensor([len(ids) for _, ids in chunks])
        tokens = torch.tensor([token for _, ids in chunks for token in ids])
        positions = torch.cat([torch.arange(start, start + len(ids))
                               for start, (_, ids) in zip(starts, chunks, strict=True)])
        offsets = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        slots = [self.tables[row][group][0] for row, _ in chunks for group in self._state_groups()]
        return BatchView(token_ids_T=tokens, positions_T=positions,
                         row_T=torch.repeat_interleave(torch.arange(len(chunks)), lengths), offsets_R1=offsets,
                         wanted_W=wanted_W, whole_W=np.ones(len(wanted_W), np.bool_), eligible=self._model.vocab_size,
                         page_tables=self._page_tables([row for row, _ in chunks]),
                         state_slots_R=torch.tensor(slots, dtype=torch.int64), caches=self.caches)

    def _state_groups(self) -> Iterator[GroupKey]:
        return (group for group in self._groups if group.kind is CacheKind.STATE)

    def _extend(self, row: str, start: int, count: int) -> None:
        tables = self.tables.setdefault(row, {group: [] for group in self._groups})
        self.length[row] = start + count
        for group, pages in tables.items():
            needed = 1 if group.kind is CacheKind.STATE else -(-(start + count) // self._page_tokens)
            pages.extend(next(self._free[group]) for _ in range(needed - len(pages)))
            if group.window is not None:
                behind = max(start - group.window + 1, 0) // self._page_tokens
                pages[:behind] = [0] * behind

    def _page_tables(self, rows: Sequence[str]) -> Mapping[GroupKey, Tensor]:
        paged = [group for group in self._groups if group.kind is not CacheKind.STATE]
        width = {group: max(len(self.tables[row][group]) for row in rows) for group in paged}
        return {group: torch.tensor([self.tables[row][group] + [0] * (width[group] - len(self.tables[row][group]))
                                     for row in rows]) for group in paged}


def _scattered(pages: int) -> Iterator[int]:
    """Pages 1 .. pages - 1, none beside its neighbour in number."""
    assert pages % 5
    return (page * 5 % pages for page in range(1, pages))


def greedy(run: PagedRun, row: str, prompt: Sequence[int], count: int) -> list[int]:
    """`count` tokens after the prompt, each by one decode step."""
    ids = [int(run.forward((row, prompt)).argmax())]
    while len(ids) < count:
        ids.append(int(run.forward((row, ids[-1:])).argmax()))
    return ids
