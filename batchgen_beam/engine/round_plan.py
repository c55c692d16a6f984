"""Which lane a suspended row goes to in the next round: a pure function from keys and expected lengths to lanes.

Owns the estimate of what a row has still to say and the balance between lanes.  Knows keys as texts and numbers only:
no records, pages, workers or Beam.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from batchgen_beam.settings import PAGE_TOKENS

__all__ = ["expected_remaining", "plan_round"]

LENGTH_SCALE = PAGE_TOKENS
"""Tokens that a row is expected to say of which nothing is known: the scale of the length law below."""


def expected_remaining(*, prompt: int, generated: int, max_tokens: int | None, context_limit: int) -> int:
    """Tokens that an unfinished row is expected to generate, at least 1.

    `prompt` and `generated` are its tokens so far, `max_tokens` bounds its answer (None: only the context does),
    `context_limit` prompt and answer together.

    Nobody knows where a row ends; its length is taken from a heavy-tailed law, the Lomax law P(length > n) =
    (c / (c + n)) ** 2 with c = `LENGTH_SCALE` tokens.  Under it, a row that has lived for g tokens and not ended lives
    for more than r others with probability ((c + g) / (c + g + r)) ** 2: the longer it was, the longer it will be.
    Cut off at the `room` that the limits leave, the mean of r is the integral of that from 0 to `room`:

        (c + g) * room / (c + g + room)

    which is c + g where the limits are far and `room` where they are near.
    """
    room = context_limit - prompt - generated
    if max_tokens is not None:
        room = min(room, max_tokens - generated)
    lived = LENGTH_SCALE + generated
    return max(1, round(lived * room / (lived + room))) if room > 0 else 1


def plan_round(rows: Iterable[tuple[str, int]], lanes: int) -> dict[str, int]:
    """The lane, 0 .. lanes - 1, of each (key, expected remaining tokens).

    The longest row goes first, to the lane that has least to do so far (Graham 1969, "LPT"); ties go to the least key
    and to the least lane.  So no lane has more to do than an even share and one row of its own.  A key that comes
    several times is planned once, as its longest; the order of `rows` does not matter.  The plan itself is in the order
    in which a lane is best worked off, longest first.
    """
    longest: dict[str, int] = {}
    for key, remaining in rows:
        longest[key] = max(remaining, longest.get(key, remaining))
    loads = [(0, lane) for lane in range(lanes)]
    plan: dict[str, int] = {}
    for key, remaining in sorted(longest.items(), key=lambda row: (-row[1], row[0])):
        load, lane = loads[0]
        plan[key] = lane
        heapq.heapreplace(loads, (load + remaining, lane))
    return plan
