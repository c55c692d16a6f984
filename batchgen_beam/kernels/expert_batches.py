"""Experts on batches of tokens: each expert runs once, on all the tokens that go to it.

Owns the order that makes a token's result independent of the others: assignments are sorted by expert (stable, so that
tokens stay in order), an expert sees one contiguous slice, and a token's weighted results are added in float32 from the
lowest expert id to the highest.  How many tokens an expert gets depends on the batch; that its products do not is the
caller's promise (`gemm`: fixed row tiles).  Does not know routers, activations or layers.

Shape suffixes: T tokens, k experts of a token, A = T * k assignments, E experts, N tokens of one expert, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen_beam.models.experts import Expert, Routing

__all__ = ["ExpertBatch", "add_up", "by_expert", "run_experts", "sorted_assignments"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertBatch:
    """The tokens that go to one expert, in order, and its weight for each."""

    expert: int
    tokens_N: Tensor
    weights_N1: Tensor


def sorted_assignments(routing: Routing, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens [A] and weights [A] of all assignments, sorted by expert and then by token, and how many each of `count`
    experts has."""
    ids_A = routing.ids_Tk.flatten()
    order_A = torch.argsort(ids_A, stable=True)
    tokens_A = torch.div(order_A, routing.ids_Tk.shape[1], rounding_mode="floor")
    return tokens_A, routing.weights_Tk.flatten()[order_A], torch.bincount(ids_A, minlength=count)


def by_expert(routing: Routing, count: int) -> Iterator[ExpertBatch]:
    """The assignments of those of `count` experts that have any, in ascending id."""
    tokens_A, weights_A, counts_E = sorted_assignments(routing, count)
    begin = 0
    for expert, tokens in enumerate(counts_E.tolist()):
        if tokens:
            part = slice(begin, begin + tokens)
            yield ExpertBatch(expert=expert, tokens_N=tokens_A[part], weights_N1=weights_A[part, None])
            begin += tokens


def add_up(results: Iterable[tuple[ExpertBatch, Tensor]], shared_TD: Tensor | None, like_TD: Tensor) -> Tensor:
    """Sum of weight times result over each token's experts, then `shared_TD`, in float32, rounded once to the shape and
    number format of `like_TD`."""
    total_TD = torch.zeros(like_TD.shape, dtype=torch.float32, device=like_TD.device)
    for batch, found_ND in results:
        total_TD.index_add_(0, batch.tokens_N, batch.weights_N1 * found_ND.float())
    if shared_TD is not None:
        total_TD += shared_TD.float()
    return total_TD.to(like_TD.dtype)


def run_experts(x_TD: Tensor, routing: Routing, experts: Sequence[Expert], run: Callable[[Tensor, Expert], Tensor],
                shared_TD: Tensor | None) -> Tensor:
    """Sum of weight times `run(x, expert)` over each token's experts, then `shared_TD`, rounded once, [T, D]."""
    results = ((batch, run(x_TD[batch.tokens_N], experts[batch.expert]))
               for batch in by_expert(routing, len(experts)))
    return add_up(results, shared_TD, x_TD)
