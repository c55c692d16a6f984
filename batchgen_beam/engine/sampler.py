"""One stream of random numbers per row, and the next token of every row of a step.

Public: `stream_key` once per admitted row and choice, `choose` once per step.

A draw's number is a pure function of (seed, row key, choice, position): no generator, nothing shared by rows.  What is
done with it is the kernel set's.  Does not know text, pages, stop conditions or scheduling.

Shape suffixes: W wanted rows.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace

import numpy as np
import numpy.typing as npt

from batchgen_beam.models.interface import KernelSet, Scores
from batchgen_beam.models.sampling import Sampled, SamplingLines

__all__ = ["choose", "stream_key", "uniform"]


def stream_key(seed: int, key_text: str, choice: int) -> int:
    """The 64-bit name of a row's random stream: BLAKE2b (RFC 7693) of seed, choice and row key."""
    fixed = seed.to_bytes(9, "little", signed=True) + choice.to_bytes(4, "little")
    name = fixed + key_text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def uniform(stream_W: npt.NDArray[np.uint64], position_W: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Number `position` of each stream, in [0, 1) with 53 bits.

    SplitMix64 started at `stream` (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators",
    figure 13), whose n-th output needs no predecessor.
    """
    z = stream_W + (position_W.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    fraction_W: npt.NDArray[np.float64] = (z >> np.uint64(11)) * 2.0**-53
    return fraction_W


def choose(kernels: KernelSet, scores: Scores, lines: SamplingLines, position_W: npt.NDArray[np.int64],
           text_vocabulary: int) -> Sampled:
    """The next token of each row: sampled where there are logits, else the greatest that the kernels found.

    `lines` are of the same W rows; `position_W` is the place of each new token in its sequence.
    """
    whole = np.flatnonzero(scores.line_W >= 0)
    if not len(whole):
        return _greatest(scores, 0)
    chosen = lines.take(whole)
    sampled = kernels.sample(scores.logits_LV, chosen, uniform(chosen.stream, position_W[whole]), text_vocabulary)
    if len(whole) == len(scores.line_W):
        return sampled
    result = _greatest(scores, sampled.top_ids_WK.shape[1])
    for field in fields(Sampled):
        getattr(result, field.name)[whole] = getattr(sampled, field.name)
    return result


def _greatest(scores: Scores, width: int) -> Sampled:
    """Every row's greatest logit, and room for `width` listed tokens."""
    return replace(Sampled.allocate(len(scores.line_W), width), ids_W=scores.ids_W, logprobs_W=scores.logprobs_W,
                   bad_W=np.isnan(scores.logprobs_W))
