"""Laws of routers: ties to the lowest id, groups, corrections, and nothing of other tokens in a token's result."""

from __future__ import annotations

import math

import pytest
import torch

from batchgen_beam.models.routing import RouterRule, Scoring, route

LOGITS = torch.randn(200, 16, generator=torch.Generator().manual_seed(4)) * 2
CORRECTION = torch.randn(16, generator=torch.Generator().manual_seed(5))

RULES = [
    RouterRule(chosen=3, scoring=Scoring.SOFTMAX),
    RouterRule(chosen=2, scoring=Scoring.SOFTMAX, renormalised=True),
    RouterRule(chosen=3, scoring=Scoring.SOFTMAX, groups=4, chosen_groups=2, scale=16.0),
    RouterRule(chosen=6, scoring=Scoring.SIGMOID, renormalised=True, epsilon=1e-20, scale=2.5, groups=4,
               chosen_groups=2, group_leaders=2),
    RouterRule(chosen=4, scoring=Scoring.SOFTMAX_OF_CHOSEN),
]


def by_hand(logits: list[float], rule: RouterRule, correction: list[float]) -> dict[int, float]:
    """One token's experts and weights in plain Python."""
    if rule.scoring is Scoring.SIGMOID:
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    else:
        scores = [math.exp(x) for x in logits]
        scores = [x / sum(scores) for x in scores] if rule.scoring is Scoring.SOFTMAX else scores
    ranked = [score + more for score, more in zip(scores, correction, strict=True)]
    size = len(ranked) // rule.groups
    groups = sorted(range(rule.groups), key=lambda g: (
        -sum(sorted(ranked[g * size:(g + 1) * size])[-rule.group_leaders:]), g))[:rule.chosen_groups]
    allowed = [e for e in range(len(ranked)) if rule.groups == 1 or e // size in groups]
    chosen = sorted(allowed, key=lambda e: (-ranked[e], e))[:rule.chosen]
    total = sum(scores[e] for e in chosen)
    divide = rule.renormalised or rule.scoring is Scoring.SOFTMAX_OF_CHOSEN
    return {e: scores[e] / (total if divide else 1.0) * rule.scale for e in chosen}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("corrected", [False, True])
def test_the_rule_is_the_one_that_is_written(rule: RouterRule, corrected: bool) -> None:
    """Experts are equal and weights close to those of the same rule in plain Python."""
    correction = CORRECTION if corrected and rule.scoring is Scoring.SIGMOID else None
    found = route(LOGITS, rule, correction)
    for token, line in enumerate(LOGITS.tolist()):
        expected = by_hand(line, rule, [0.0] * 16 if correction is None else correction.tolist())
        ours = dict(zip(found.ids_Tk[token].tolist(), found.weights_Tk[token].tolist(), strict=True))
        assert ours.keys() == expected.keys()
        assert all(abs(ours[e] - expected[e]) <= 1e-5 * expected[e] for e in ours)


@pytest.mark.parametrize("rule", RULES)
def test_a_token_is_routed_alike_in_any_company(rule: RouterRule) -> None:
    """Ids and weights have the same bits alone, and in batches of any size."""
    whole = route(LOGITS, rule)
    for part in (slice(0, 1), slice(3, 10), slice(0, 17), slice(100, 200)):
        found = route(LOGITS[part], rule)
        assert torch.equal(found.ids_Tk, whole.ids_Tk[part])
        assert torch.equal(found.weights_Tk, whole.weights_Tk[part])


@pytest.mark.parametrize("rule", RULES)
def test_ties_go_to_the_lowest_id(rule: RouterRule) -> None:
    """Equal logits: the first experts (of the first groups), in order."""
    assert route(torch.zeros(5, 16), rule).ids_Tk.tolist() == [list(range(rule.chosen))] * 5


def test_experts_outside_the_best_groups_never_win() -> None:
    """Also where a correction makes all ranks negative: they count as minus infinity, not as 0."""
    rule = RouterRule(chosen=4, scoring=Scoring.SIGMOID, groups=4, chosen_groups=1, group_leaders=2)
    logits = torch.full((1, 16), -2.0)
    logits[0, 8:12] = 1.0
    assert sorted(route(logits, rule, torch.full((16,), -5.0)).ids_Tk[0].tolist()) == [8, 9, 10, 11]
