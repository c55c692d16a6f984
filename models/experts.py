"""The nouns of a sparse feed-forward part: which experts a token goes to, an expert's weights, and its activation.

Plain data that models hand to kernel sets.  Does not know how experts are chosen or computed.

Shape suffixes: T tokens, k chosen experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["SILU", "Activation", "Expert", "Routing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """What a gated part makes of its halves: `gate / (1 + exp(-alpha * gate)) * (up + shift)`.

    A `limit` cuts gate from above and up on both sides before that.
    """

    alpha: float = 1.0
    limit: float | None = None
    shift: float = 0.0


SILU = Activation()
"""`silu(gate) * up`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """ids_Tk int64, distinct within a token and in any order; weights_Tk float32, of the same experts."""

    ids_Tk: Tensor
    weights_Tk: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """One expert's weights as the kernel set packed them; `gate_up` has two parts."""

    gate_up: Any
    down: Any
