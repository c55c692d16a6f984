"""Laws of the sampling parameters as arrays."""

from __future__ import annotations

import numpy as np

from batchgen_beam.models.sampling import SamplingLines
from batchgen_beam.records import SamplingParams


def test_taken_lines_are_copies() -> None:
    """`take` gives the lines of the wanted slots in the wanted order; a slot that is filled anew leaves them alone."""
    slots = SamplingLines.allocate(3)
    slots.put(1, SamplingParams(temperature=0.5, top_k=7, top_p=0.25, logprobs=4), 2**64 - 1)
    taken = slots.take(np.array([1, 0]))
    slots.put(1, SamplingParams(temperature=0.0), 0)
    assert taken.top_k.tolist() == [7, 0]
    assert taken.stream.tolist() == [2**64 - 1, 0]
    assert taken.greedy.tolist() == [False, True]
    assert (taken.temperature[0], taken.top_p[0], taken.logprobs[0]) == (0.5, 0.25, 4)
