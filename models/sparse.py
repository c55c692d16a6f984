"""The sparse feed-forward part: a router, many experts of which each token goes to a few, and a shared one for all.

Owns the order of operations; the rules of choice are in `routing`, the products in the kernel set.  Does not know what
stands around it.

Shape suffixes: T tokens, D hidden size, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from batchgen_beam.models.experts import SILU, Activation, Expert
from batchgen_beam.models.feed_forward import GatedFeedForward
from batchgen_beam.models.parameters import Parameters
from batchgen_beam.models.routing import RouterRule, route

__all__ = ["SparseFeedForward"]


class SparseFeedForward:
    """Parameters: `router` and, where there is one, `router.bias` and `router.correction`, whose logits are float32;
    `experts.<e>.{gate,up,down}` with biases if `biased`, `shared.{gate,up,down}`."""

    def __init__(self, source: Parameters, rule: RouterRule, count: int, *, corrected: bool = False,
                 shared: bool = False, biased: bool = False, activation: Activation = SILU) -> None:
        self._kernels = source.kernels
        self._rule = rule
        self._activation = activation
        self._router = source.packed_exact("router")
        self._bias_E = source.tensor("router.bias") if biased else None
        self._correction_E = source.tensor("router.correction") if corrected else None
        self.experts: Sequence[Expert] = [_expert(source.under(f"experts.{e}"), biased) for e in range(count)]
        self._shared = GatedFeedForward(source.under("shared")) if shared else None

    def __call__(self, normed_TD: Tensor) -> Tensor:
        """Token by token, [T, D]."""
        logits_TE = self._kernels.head(normed_TD, self._router)
        if self._bias_E is not None:
            logits_TE = logits_TE + self._bias_E
        shared_TD = None if self._shared is None else self._shared(normed_TD)
        return self._kernels.experts(normed_TD, route(logits_TE, self._rule, self._correction_E), self.experts,
                                     self._activation, shared_TD=shared_TD)


def _expert(source: Parameters, biased: bool) -> Expert:
    return Expert(gate_up=source.packed("gate", "up", biased=biased), down=source.packed("down", biased=biased))
