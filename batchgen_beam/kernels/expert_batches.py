"""Experts on batches of tokens: each expert runs once, on all the tokens that go to it.

Owns the order that makes a token's result independent of the others: assignments are sorted by expert (stable, so that
tokens stay in order), an expert sees one contiguous slice, and a token's weighted results are added in float32 from the
lowest expert id to the highest.  How many tokens an expert gets depends on the batch; that its products do not is the
caller's promise (`gemm`: fixed row tiles).  Does not know routers, activations or layers.

Shape suffixes: T tokens, k experts of a token, A = T * k assignments, N tokens of one expert, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from batchgen_beam.models.experts import Expert, Routing

__all__ = ["run_experts"]


def run_experts(x_TD: Tensor, routing: Routing, experts: Sequence[Expert], run: Callable[[Tensor, Expert], Tensor],
                shared_TD: Tensor | None) -> Tensor:
    """Sum of weight times `run(x, expert)` over each token's experts, then `shared_TD`, rounded once, [T, D]."""
    chosen = routing.ids_Tk.shape[1]
    order_A = torch.argsort(routing.ids_Tk.flatten(), stable=True)
    tokens_A, weights_A1 = order_A // chosen, routing.weights_Tk.flatten()[order_A, None]
    total_TD = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
    begin = 0
    for expert, count in enumerate(torch.bincount(routing.ids_Tk.flatten(), minlength=len(experts)).tolist()):
        if count:
            part = slice(begin, begin + count)
            tokens_N = tokens_A[part]
            found_ND = run(x_TD[tokens_N], experts[expert]).float()
            total_TD.index_add_(0, tokens_N, weights_A1[part] * found_ND)
            begin += count
    if shared_TD is not None:
        total_TD += shared_TD.float()
    return total_TD.to(x_TD.dtype)
