"""Which experts a token goes to, and with what weights: the rules of routers, in float32.

Softmax over all experts (Mixtral, Qwen3, DeepSeek-V2), sigmoid with a correction bias and groups of experts
(DeepSeek-V3, arXiv:2412.19437, section 2.1.2), or softmax over the chosen ones alone (GPT-OSS).  Ties go to the lowest
id.  A token's result depends on its own logits alone: sums over few columns are written out, since a library's
reduction may go another way for other shapes, and `exp` is the only transcendental beside the row-wise softmax.
Does not know experts, weights or layers.

Shape suffixes: T tokens, E experts, k chosen ones, G groups, M experts of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from batchgen_beam.models.experts import Routing

__all__ = ["RouterRule", "Scoring", "route"]


class Scoring(StrEnum):
    """How logits become weights."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    SOFTMAX_OF_CHOSEN = "softmax of chosen"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRule:
    """`chosen` experts of each token; weights are divided by their sum plus `epsilon` if `renormalised`, and then
    multiplied by `scale`.

    With more than one of `groups` (equal ranges of ids), only the experts of the best `chosen_groups` take part: a
    group's rank is the sum of its best `group_leaders` scores.
    """

    chosen: int
    scoring: Scoring
    renormalised: bool = False
    epsilon: float = 0.0
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    group_leaders: int = 1


def route(logits_TE: Tensor, rule: RouterRule, correction_E: Tensor | None = None) -> Routing:
    """The experts of each token, best first; a correction counts in the choice and not in the weights."""
    scores_TE = _scores(logits_TE, rule.scoring)
    ranked_TE = scores_TE if correction_E is None else scores_TE + correction_E
    if rule.groups > 1:
        ranked_TE = _in_best_groups(ranked_TE, rule)
    ids_Tk = _best(ranked_TE, rule.chosen)
    weights_Tk = scores_TE.gather(1, ids_Tk)
    if rule.scoring is Scoring.SOFTMAX_OF_CHOSEN:
        weights_Tk = torch.softmax(weights_Tk, -1)
    elif rule.renormalised:
        weights_Tk = weights_Tk / (_sum(weights_Tk) + rule.epsilon)
    return Routing(ids_Tk=ids_Tk, weights_Tk=weights_Tk * rule.scale)


def _scores(logits_TE: Tensor, scoring: Scoring) -> Tensor:
    if scoring is Scoring.SOFTMAX:
        return torch.softmax(logits_TE, -1)
    return 1.0 / (1.0 + torch.exp(-logits_TE)) if scoring is Scoring.SIGMOID else logits_TE


def _best(scores: Tensor, count: int) -> Tensor:
    """Places of the greatest in the last dimension, the lowest place first among equals."""
    places: Tensor = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return places[..., :count]


def _sum(values: Tensor) -> Tensor:
    """Over the last dimension, from the first value to the last, keeping the dimension."""
    total = values[..., :1]
    for place in range(1, values.shape[-1]):
        total = total + values[..., place : place + 1]
    return total


def _in_best_groups(ranked_TE: Tensor, rule: RouterRule) -> Tensor:
    """Minus infinity for the experts of all but the best groups."""
    ranked_TGM = ranked_TE.unflatten(1, (rule.groups, -1))
    leaders = torch.sort(ranked_TGM, dim=-1, descending=True).values[..., :rule.group_leaders]
    best_Tk = _best(_sum(leaders)[..., 0], rule.chosen_groups)
    out_TG = torch.ones_like(ranked_TGM[..., 0], dtype=torch.bool).scatter_(1, best_Tk, False)
    kept_TE: Tensor = ranked_TGM.masked_fill(out_TG[..., None], -torch.inf).flatten(1)
    return kept_TE
