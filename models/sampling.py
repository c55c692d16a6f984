"""What sampling is asked and what it answers: parameters of many rows as arrays, and the tokens chosen.

The rules are those of `interface.KernelSet.sample`.  Does not know streams of random numbers, text or scheduling.

Shape suffixes: W wanted rows, K log-probabilities wanted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from batchgen_beam.records import SamplingParams

__all__ = ["Sampled", "SamplingLines"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingLines:
    """Parameters as arrays, one line per engine slot (or per wanted row, after `take`).

    temperature float32; top_k int64, 0 off; top_p float64, 1 off; stream uint64, the row's own random numbers; logprobs
    int64, number of most likely tokens to report; greedy bool.
    """

    temperature: npt.NDArray[np.float32]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]
    stream: npt.NDArray[np.uint64]
    logprobs: npt.NDArray[np.int64]
    greedy: npt.NDArray[np.bool_]

    @classmethod
    def allocate(cls, slots: int) -> SamplingLines:
        """Lines for `slots` slots, greedy until they are put."""
        return cls(temperature=np.ones(slots, np.float32), top_k=np.zeros(slots, np.int64), top_p=np.ones(slots),
                   stream=np.zeros(slots, np.uint64), logprobs=np.zeros(slots, np.int64), greedy=np.ones(slots, bool))

    def put(self, slot: int, params: SamplingParams, stream: int) -> None:
        """Fill one line."""
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.stream[slot] = stream
        self.logprobs[slot] = params.logprobs
        self.greedy[slot] = params.greedy

    @property
    def whole(self) -> npt.NDArray[np.bool_]:
        """Whether a row needs all its logits, and not only the greatest with its log-probability."""
        return ~self.greedy | (self.logprobs > 0)

    def take(self, slots_W: npt.NDArray[np.int64]) -> SamplingLines:
        """The lines of the wanted rows, copied."""
        return SamplingLines(**{f.name: getattr(self, f.name)[slots_W] for f in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """One step's result on the host.

    ids_W int64; logprobs_W float32, natural log-probability of the chosen id under the raw logits; top_ids_WK int64 and
    top_logprobs_WK float32, most likely first, ties to the lowest id, K the largest width in the batch (a row's own
    width comes first, the rest is not its own); bad_W: the row's logits are not all finite, its other values mean
    nothing.
    """

    ids_W: npt.NDArray[np.int64]
    logprobs_W: npt.NDArray[np.float32]
    top_ids_WK: npt.NDArray[np.int64]
    top_logprobs_WK: npt.NDArray[np.float32]
    bad_W: npt.NDArray[np.bool_]

    @classmethod
    def allocate(cls, rows: int, width: int) -> Sampled:
        """Zeros for so many rows, each with a list of `width`."""
        return cls(ids_W=np.zeros(rows, np.int64), logprobs_W=np.zeros(rows, np.float32),
                   top_ids_WK=np.zeros((rows, width), np.int64), top_logprobs_WK=np.zeros((rows, width), np.float32),
                   bad_W=np.zeros(rows, bool))
