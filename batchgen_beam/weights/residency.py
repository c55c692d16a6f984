"""Which weights stay in memory under a limit, and which are streamed.  Pure arithmetic; reads and allocates nothing.

A unit is what is read at once: a layer's attention, its dense or shared part, one expert.  A step needs each streamed
byte at most once (or once for each part of it, where --expert-batch cuts it), so the plan with the fewest of them is
the fastest; units that every token needs stay first, since an expert that no token chose isn't needed, then the first
expert of every layer, the second, and so on, so that no layer waits longer for the disk than another.  Does not know
kernels or files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from batchgen_beam.errors import OptionError

__all__ = ["Residency", "Unit", "choose_residency", "least_limit", "streaming_order"]

LEAST_BUFFERS = 2
"""One in use, one on its way."""

MOST_BUFFERS = 6
BUFFER_SHARE = 8
"""Beyond the least, buffers take at most one part in so many of what is left beside the fixed bytes: the room that they
take is read again every step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """`size` bytes of a layer that are read at once.  `rank` None: every token needs it; else its number among units
    that only some tokens need."""

    name: str
    layer: int
    size: int
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """A plan.  `resident` and `streamed` are names; `buffers` of `buffer_bytes` hold what is streamed.

    `total_bytes`: all weights in memory at once, of which `fixed_bytes` are no units and `resident_bytes` are.
    """

    resident: frozenset[str]
    streamed: frozenset[str]
    buffers: int
    buffer_bytes: int
    fixed_bytes: int
    resident_bytes: int
    scratch_bytes: int
    streamed_bytes: int

    @property
    def total_bytes(self) -> int:
        """What the plan takes of memory."""
        return self.fixed_bytes + self.resident_bytes + self.buffers * self.buffer_bytes + self.scratch_bytes


def streaming_order(units: Iterable[Unit]) -> list[Unit]:
    """In the order of a forward pass: by layer, what every token needs first."""
    return sorted(units, key=lambda unit: (unit.layer, unit.rank is not None, unit.rank or 0))


def choose_residency(units: Sequence[Unit], *, limit: int, fixed: int, unpacked: bool = False) -> Residency:
    """The plan for at most `limit` bytes.

    `fixed` bytes are always in memory (embedding, head, norms); `unpacked`: a streamed unit in use takes its size once
    more.  An `OptionError` tells the numbers where no plan fits.
    """
    ranked, copies = _ranked(units), int(unpacked)
    kept, largest = _kept(ranked, fixed), _largest(ranked)
    least = _least(kept, largest, copies)
    fitting = [count for count, memory in enumerate(least) if memory <= limit]
    if not fitting:
        count = min(range(len(least)), key=least.__getitem__)
        raise OptionError(_refusal(limit, fixed, kept[count] - fixed, largest[count], copies))
    buffer = largest[fitting[-1]]
    for buffers in range(_wanted_buffers(limit - fixed, buffer), LEAST_BUFFERS - 1, -1):
        resident = _fitting(ranked, limit - fixed - (buffers + copies) * buffer)
        streamed = [unit for unit in units if unit.name not in resident]
        if all(unit.size <= buffer for unit in streamed):
            break
    used = buffers if streamed else 0
    return Residency(resident=frozenset(resident), streamed=frozenset(unit.name for unit in streamed), buffers=used,
                     buffer_bytes=buffer, fixed_bytes=fixed, resident_bytes=sum(resident.values()),
                     scratch_bytes=copies * buffer, streamed_bytes=sum(unit.size for unit in streamed))


def least_limit(units: Sequence[Unit], *, fixed: int, unpacked: bool = False) -> int:
    """The least `limit` that `choose_residency` has a plan for."""
    ranked = _ranked(units)
    return min(_least(_kept(ranked, fixed), _largest(ranked), int(unpacked)))


def _ranked(units: Iterable[Unit]) -> list[Unit]:
    """In the order in which they stay."""
    return sorted(units, key=lambda unit: (unit.rank is not None, unit.rank or 0, unit.layer, unit.name))


def _kept(ranked: Iterable[Unit], fixed: int) -> list[int]:
    """Bytes in memory once the first 0, 1, ... units stay."""
    return list(accumulate((unit.size for unit in ranked), initial=fixed))


def _largest(ranked: Sequence[Unit]) -> list[int]:
    """The largest of the units after the first 0, 1, ... ones."""
    return [*accumulate((unit.size for unit in reversed(ranked)), max, initial=0)][::-1]


def _least(kept: Iterable[int], largest: Iterable[int], copies: int) -> list[int]:
    """Bytes of plans in which the first 0, 1, ... units stay and the others are streamed."""
    return [memory + (LEAST_BUFFERS + copies) * size for memory, size in zip(kept, largest, strict=True)]


def _wanted_buffers(room: int, size: int) -> int:
    """As many as their share of the room holds, at least the least."""
    return max(LEAST_BUFFERS, min(MOST_BUFFERS, room // BUFFER_SHARE // size)) if size else LEAST_BUFFERS


def _fitting(ranked: Iterable[Unit], room: int) -> dict[str, int]:
    """Sizes by name of those that fit, the first first."""
    resident: dict[str, int] = {}
    for unit in ranked:
        if unit.size <= room:
            resident[unit.name] = unit.size
            room -= unit.size
    return resident


def _refusal(limit: int, fixed: int, resident: int, buffer: int, copies: int) -> str:
    unpacking = f" and {buffer:,} to unpack one" if copies else ""
    return (f"--weight-memory={limit:,} is too little: what is always in memory (embedding, head, norms, routers) "
            f"takes {fixed:,} bytes, {LEAST_BUFFERS} buffers of {buffer:,} stream the layers{unpacking}, {resident:,} "
            f"are resident beside them: at least {fixed + resident + (LEAST_BUFFERS + copies) * buffer:,} bytes")
