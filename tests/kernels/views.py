"""Packed batches for kernel tests: rows of any context, each with its own shuffled pages."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from batchgen_beam.models.interface import BatchView, GroupKey

PAGE = 64


def tables(lengths: list[int], generator: torch.Generator) -> Tensor:
    """Page tables [R, P] that give each row pages of its own, in shuffled order, none of them page 0."""
    counts = [-(-length // PAGE) for length in lengths]
    ids = (torch.randperm(sum(counts), generator=generator) + 1).split(counts)
    return torch.stack([torch.cat((row, row.new_zeros(max(counts) - len(row)))) for row in ids])


def view(rows: list[range], table_RP: Tensor, group: GroupKey) -> BatchView:
    """The batch of these positions of each row."""
    lengths_R = torch.tensor([len(row) for row in rows])
    positions_T = torch.cat([torch.arange(row.start, row.stop) for row in rows])
    offsets_R1 = torch.cat((lengths_R.new_zeros(1), lengths_R.cumsum(0)))
    return BatchView(token_ids_T=torch.zeros_like(positions_T), positions_T=positions_T,
                     row_T=torch.repeat_interleave(lengths_R), offsets_R1=offsets_R1, wanted_W=offsets_R1[1:] - 1,
                     whole_W=np.ones(len(rows), np.bool_), eligible=0,
                     page_tables={group: table_RP}, state_slots_R=lengths_R.new_zeros(0), caches=())
