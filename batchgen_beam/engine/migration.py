"""What it would cost to bring a row's KV along when it moves, and what it costs to make it again.

Owns the rule that chooses between the two.  Pure: measures nothing, moves nothing, knows no pool and no network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["BANDWIDTH", "LATENCY", "Move", "MoveCosts"]

BANDWIDTH = 1.25e9
"""Bytes per second between two workers where nobody measured it: a link of 10 Gbit/s."""

LATENCY = 1e-3
"""Seconds until the first byte of a row's pages comes, within one data centre."""


class Move(StrEnum):
    """How a row's KV comes to the worker where it goes on.

    Only RECOMPUTE is implemented: a row always travels as its continuation record and is prefilled again.  KV is a
    verdict that is counted, so that a run shows what moving pages would be worth.
    """

    KV = "kv"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveCosts:
    """`kv_bytes` per token of context, `bandwidth` in bytes/s, `latency` in s, `prefill_speed` in tokens/s."""

    kv_bytes: float
    prefill_speed: float
    bandwidth: float = BANDWIDTH
    latency: float = LATENCY

    def __post_init__(self) -> None:
        if self.kv_bytes < 0 or self.latency < 0 or self.bandwidth <= 0 or self.prefill_speed <= 0:
            raise ValueError(f"bandwidth and prefill speed must be over 0, bytes and latency at least 0, got {self}")

    @property
    def crossover(self) -> float:
        """The context (tokens) from which on moving KV is cheaper; infinite where it never is.

        Moving n tokens takes latency + n * kv_bytes / bandwidth seconds, computing them again n / prefill_speed.
        They are equal at

            n = latency / (1 / prefill_speed - kv_bytes / bandwidth)

        and recomputing stays cheaper for every n where that denominator is not positive.
        """
        saved = 1 / self.prefill_speed - self.kv_bytes / self.bandwidth
        return self.latency / saved if saved > 0 else math.inf

    def cheaper(self, context: int) -> Move:
        """The cheaper way to move a row of `context` tokens; RECOMPUTE where both cost the same."""
        return Move.KV if context > self.crossover else Move.RECOMPUTE
