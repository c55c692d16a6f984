"""Seconds of tasks from measured points: straight lines between them, and the last one's slope beyond.

Owns the form of the points, on disk too, and what lies between them.  Does not know how they were measured or what a
plan is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from batchgen_beam.engine.model_load import LayerLoad, ModelLoad

__all__ = ["Curve", "LayerTimes", "MachineTimes", "MeasuredCosts", "Surface", "kinds_of"]


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds at numbers of tokens, at least two of them, ascending; more tokens never take less time."""

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 1 < len(self.tokens) == len(self.seconds) or list(self.tokens) != sorted(set(self.tokens)):
            raise ValueError(f"two points or more that ascend, seconds for each: {self.tokens}, {self.seconds}")
        if min(self.seconds) < 0 or list(self.seconds) != sorted(self.seconds):
            raise ValueError(f"seconds do not fall: {self.seconds}")

    @classmethod
    def of(cls, points: Mapping[int, float]) -> Curve:
        """Measured points; where chance made a larger one faster, it counts as fast as the smaller."""
        tokens = sorted(points)
        return cls(tuple(tokens), tuple(accumulate((points[one] for one in tokens), max)))

    def at(self, tokens: float) -> float:
        """Below the first point as much as there, for a call has a least price."""
        if tokens <= self.tokens[0]:
            return self.seconds[0]
        right = min(bisect_left(self.tokens, tokens), len(self.tokens) - 1)
        left = right - 1
        slope = (self.seconds[right] - self.seconds[left]) / (self.tokens[right] - self.tokens[left])
        return self.seconds[left] + slope * (tokens - self.tokens[left])


@dataclass(frozen=True, slots=True)
class Surface:
    """Curves at two lengths of context, the shorter one first."""

    contexts: tuple[float, float]
    curves: tuple[Curve, Curve]

    def __post_init__(self) -> None:
        if not 0 <= self.contexts[0] < self.contexts[1]:
            raise ValueError(f"two lengths, ascending: {self.contexts}")

    def at(self, tokens: float, context: float) -> float:
        """Straight through both lengths; never less than nothing, nor falling with the context."""
        short, long = (curve.at(tokens) for curve in self.curves)
        slope = max(0.0, long - short) / (self.contexts[1] - self.contexts[0])
        return max(0.0, short + slope * (context - self.contexts[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """One kind of layer: attention of answers and of prompts, and the feed-forward half."""

    decode: Surface
    prompt: Surface
    feed_forward: Curve


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineTimes:
    """What one machine takes for each kind of layer of a model, in the order in which the kinds come first.

    `head` has the logits of so many tokens, their choice, and what else a pass takes once; `combine` is seconds of one
    token's way through the exchange; `disk` bytes/s.
    """

    kinds: tuple[LayerTimes, ...]
    head: Curve
    combine: float
    disk: float

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers."""
        return asdict(self)

    @classmethod
    def from_json(cls, source: Mapping[str, Any]) -> MachineTimes:
        """The reverse; `KeyError`, `TypeError` or `ValueError` for anything else."""
        return cls(kinds=tuple(LayerTimes(decode=_surface(kind["decode"]), prompt=_surface(kind["prompt"]),
                                          feed_forward=_curve(kind["feed_forward"])) for kind in source["kinds"]),
                   head=_curve(source["head"]), combine=float(source["combine"]), disk=float(source["disk"]))


def _curve(source: Mapping[str, Any]) -> Curve:
    return Curve(tuple(map(int, source["tokens"])), tuple(map(float, source["seconds"])))


def _surface(source: Mapping[str, Any]) -> Surface:
    (short, long), (first, second) = source["contexts"], map(_curve, source["curves"])
    return Surface((float(short), float(long)), (first, second))


class MeasuredCosts:
    """Implements `planner.Costs` for a machine whose processor computes in the host's memory."""

    to_device = None
    to_host = None

    def __init__(self, model: ModelLoad, times: MachineTimes) -> None:
        kinds = kinds_of(model.layers)
        if len(kinds) != len(times.kinds):
            raise ValueError(f"{len(kinds)} kinds of layers, times of {len(times.kinds)}")
        self._times = times
        self._kinds = dict(zip(kinds, times.kinds, strict=True))

    @property
    def disk(self) -> float:
        """Bytes/s."""
        return self._times.disk

    def attention(self, layer: LayerLoad, tokens: int, context: float, *, prompt: bool) -> float:
        """A sub-batch."""
        times = self._kinds[layer].prompt if prompt else self._kinds[layer].decode
        farthest = context if layer.window is None else max(layer.window, times.contexts[1])
        return times.at(tokens, min(context, farthest))

    def feed_forward(self, layer: LayerLoad, tokens: int) -> float:
        """All tokens of a pass."""
        return self._kinds[layer].feed_forward.at(tokens)

    def combine(self, tokens: int) -> float:
        """Both ways of all tokens."""
        return self._times.combine * tokens

    def head(self, tokens: int) -> float:
        """Once a pass."""
        return self._times.head.at(tokens)


def kinds_of(layers: Iterable[LayerLoad]) -> tuple[LayerLoad, ...]:
    """Each kind once, as they come first."""
    return tuple(dict.fromkeys(layers))
