"""Which weights stay in memory under a limit, and which are streamed.  Pure arithmetic; reads and allocates nothing.

A step reads every streamed byte once, so the plan with the fewest of them is the fastest.  Two kinds of plan are
compared: as many whole layers resident as fit, or of every layer the same number of areas (modules, experts), which
makes the buffers smaller.  Does not know kernels or files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from batchgen_beam.errors import OptionError

__all__ = ["LayerSizes", "Residency", "choose_residency"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSizes:
    """A layer's areas and their bytes, in the order in which they become resident."""

    layer: int
    areas: tuple[tuple[str, int], ...]

    def after(self, count: int) -> int:
        """Bytes of all areas but the first `count`."""
        return sum(size for _, size in self.areas[count:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """A plan.  `streamed`: areas by layer, no layer without any; `total_bytes`: all weights in memory at once."""

    resident: tuple[str, ...]
    streamed: Mapping[int, tuple[str, ...]]
    buffers: int
    buffer_bytes: int
    streamed_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Budget:
    layers: tuple[LayerSizes, ...]
    fixed: int
    scratch: int
    buffers: int

    def streamed(self, counts: Sequence[int]) -> int:
        return sum(layer.after(count) for layer, count in zip(self.layers, counts, strict=True))

    def buffer(self, counts: Sequence[int]) -> int:
        return max((layer.after(count) for layer, count in zip(self.layers, counts, strict=True)), default=0)

    def total(self, counts: Sequence[int]) -> int:
        """Bytes in memory if the first `counts` areas of each layer are resident."""
        resident = sum(layer.after(0) for layer in self.layers) - self.streamed(counts)
        buffer = self.buffer(counts)
        return self.fixed + resident + (self.buffers * buffer + self.scratch if buffer else 0)


def choose_residency(layers: Sequence[LayerSizes], *, limit: int, fixed: int, scratch: int = 0,
                     buffers: int = 2) -> Residency:
    """The plan of the fewest streamed bytes whose memory is at most `limit`; the fewest resident ones among equals.

    `fixed` bytes are always in memory (embedding, head, norms), `scratch` while anything is streamed.  An `OptionError`
    tells the numbers where no plan fits.
    """
    budget = _Budget(layers=tuple(sorted(layers, key=lambda layer: layer.layer)), fixed=fixed, scratch=scratch,
                     buffers=buffers)
    plans = [counts for counts in _candidates(budget, limit) if budget.total(counts) <= limit]
    if not plans:
        raise OptionError(_refusal(budget, limit))
    counts = min(plans, key=lambda counts: (budget.streamed(counts), budget.total(counts), counts))
    pairs = list(zip(budget.layers, counts, strict=True))
    return Residency(
        resident=tuple(name for layer, count in pairs for name, _ in layer.areas[:count]),
        streamed={layer.layer: tuple(name for name, _ in layer.areas[count:]) for layer, count in pairs
                  if count < len(layer.areas)},
        buffers=buffers, buffer_bytes=budget.buffer(counts), streamed_bytes=budget.streamed(counts),
        total_bytes=budget.total(counts))


def _candidates(budget: _Budget, limit: int) -> list[tuple[int, ...]]:
    """Resident areas of each layer: level by level, whole layers first to last, each with what still fits beside it."""
    sizes = [len(layer.areas) for layer in budget.layers]
    levels = [tuple(min(level, size) for size in sizes) for level in range(max(sizes, default=0) + 1)]
    whole = [tuple(size if i < count else 0 for i, size in enumerate(sizes)) for count in range(len(sizes) + 1)]
    plans = [*levels, *whole]
    return plans + [_extended(plan, budget, limit) for plan in plans if budget.total(plan) <= limit]


def _extended(counts: tuple[int, ...], budget: _Budget, limit: int) -> tuple[int, ...]:
    """One more area of each layer, in order, while the memory lasts."""
    room = limit - budget.total(counts)
    extended = list(counts)
    for i, layer in enumerate(budget.layers):
        size = layer.areas[counts[i]][1] if counts[i] < len(layer.areas) else 0
        if 0 < size <= room:
            room -= size
            extended[i] += 1
    return tuple(extended)


def _refusal(budget: _Budget, limit: int) -> str:
    least = min(_candidates(budget, 0), key=lambda counts: (budget.total(counts), counts))
    buffer, total = budget.buffer(least), budget.total(least)
    resident = total - budget.fixed - (budget.buffers * buffer + budget.scratch if buffer else 0)
    return (f"--weight-memory={limit:,} is too little: what is always in memory (embedding, head, norms) takes "
            f"{budget.fixed:,} bytes, {budget.buffers} buffers of {buffer:,} stream the layers, {resident:,} are "
            f"resident beside them and {budget.scratch:,} are needed to unpack: at least {total:,} bytes")
