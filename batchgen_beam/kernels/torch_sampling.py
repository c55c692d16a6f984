"""The next token of every row in plain torch, on any device; the reference of all other sets.

A row's results are a function of its own logits and parameters, bit for bit; that is why there is no reduction whose
order depends on the number of rows: `softmax` and `log_softmax` run row by row, running sums are `cumsum`.

Shape suffixes: W wanted rows, V vocabulary, U text vocabulary, K log-probabilities wanted, C candidates of a nucleus.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen_beam.models.sampling import Sampled, SamplingLines

__all__ = ["sample"]

BLOCK_ELEMENTS = 1 << 19
"""Logits that are worked on at once: bounds memory to a few times 4 MiB whatever the batch."""

NUCLEUS_CANDIDATES = 512
"""Ids that are sorted for top_p first; a row whose nucleus is larger is sorted whole, with the same result."""


def sample(logits_WV: Tensor, lines: SamplingLines, uniform_W: npt.NDArray[np.float64],
           text_vocabulary: int) -> Sampled:
    """The next token of each row, as `models.interface.KernelSet.sample` says."""
    rows, vocabulary = logits_WV.shape
    step = max(1, BLOCK_ELEMENTS // vocabulary)
    result = Sampled.allocate(rows, int(lines.logprobs.max(initial=0)))
    for start in range(0, rows, step):
        block = np.arange(start, min(start + step, rows))
        _sample_block(logits_WV[block[0] : block[-1] + 1], lines.take(block), uniform_W[block], text_vocabulary,
                      result, start)
    return result


def _sample_block(logits_WV: Tensor, lines: SamplingLines, uniform_W: npt.NDArray[np.float64], text_vocabulary: int,
                  result: Sampled, start: int) -> None:
    """Fill `result` from line `start` on."""
    part = slice(start, start + logits_WV.shape[0])
    text_WU = logits_WV[:, :text_vocabulary]
    bad_W = ~(torch.isfinite(logits_WV.amin(-1)) & torch.isfinite(logits_WV.amax(-1)))
    result.bad_W[part] = bad_W.numpy(force=True)
    ids_W = torch.argmax(text_WU, dim=-1)
    drawn = np.flatnonzero(~lines.greedy)
    if drawn.size:
        index = torch.from_numpy(drawn).to(logits_WV.device)
        ids_W[index] = _draw(text_WU[index], lines.take(drawn), uniform_W[drawn])
    logprobs_WV = torch.log_softmax(logits_WV, dim=-1)
    result.ids_W[part] = ids_W.numpy(force=True)
    result.logprobs_W[part] = logprobs_WV.gather(1, ids_W[:, None])[:, 0].numpy(force=True)
    listed = np.flatnonzero(lines.logprobs)
    if listed.size:
        index = torch.from_numpy(listed).to(logits_WV.device)
        count = min(result.top_ids_WK.shape[1], text_vocabulary)
        top_WK = _most_likely(text_WU[index].masked_fill(bad_W[index, None], 0.0), count)
        result.top_ids_WK[start + listed, :count] = top_WK.numpy(force=True)
        result.top_logprobs_WK[start + listed, :count] = logprobs_WV[index].gather(1, top_WK).numpy(force=True)


def _draw(text_WU: Tensor, lines: SamplingLines, uniform_W: npt.NDArray[np.float64]) -> Tensor:
    """Ids drawn by temperature, top_k and top_p, [W]."""
    device = text_WU.device
    temperature_W = torch.from_numpy(lines.temperature).to(device)
    scaled_WU = (text_WU - text_WU.amax(-1, keepdim=True)) / temperature_W[:, None]
    limited = np.flatnonzero((lines.top_k > 0) & (lines.top_k < text_WU.shape[1]))
    if limited.size:
        index = torch.from_numpy(limited).to(device)
        scaled_WU[index] = _keep_top_k(scaled_WU[index], torch.from_numpy(lines.top_k[limited]).to(device))
    weights_WU = torch.softmax(scaled_WU, dim=-1)
    nuclear = np.flatnonzero(lines.top_p < 1.0)
    if nuclear.size:
        index = torch.from_numpy(nuclear).to(device)
        weights_WU[index] = _keep_top_p(weights_WU[index], torch.from_numpy(lines.top_p[nuclear]).to(device))
    return _inverse_cdf(weights_WU, torch.from_numpy(uniform_W).to(device))


def _keep_top_k(scaled_WU: Tensor, k_W: Tensor) -> Tensor:
    """Values below the k-th largest become -inf; ties with it stay."""
    largest = torch.topk(scaled_WU, int(k_W.max())).values
    return scaled_WU.masked_fill(scaled_WU < largest.gather(1, k_W[:, None] - 1), -torch.inf)


def _keep_top_p(weights_WU: Tensor, p_W: Tensor) -> Tensor:
    """Weights outside the smallest set whose mass reaches p become 0; the largest always stays.

    In descending order (ties: lowest id first) an id stays iff the mass before it is under p.  Sums are running sums,
    so a row's first candidates give the same bits as its full order.
    """
    goal_W = p_W * weights_WU.cumsum(-1, dtype=torch.float64)[:, -1]
    candidates_WC = torch.topk(weights_WU, min(NUCLEUS_CANDIDATES, weights_WU.shape[1])).values
    size_W, cutoff_W = _nucleus(candidates_WC, goal_W)
    for row in torch.nonzero(size_W > candidates_WC.shape[1])[:, 0].tolist():
        descending_1U = torch.sort(weights_WU[row : row + 1], descending=True).values
        size_W[row], cutoff_W[row] = (one[0] for one in _nucleus(descending_1U, goal_W[row : row + 1]))
    return weights_WU.masked_fill(~_largest(weights_WU, cutoff_W, size_W), 0.0)


def _nucleus(descending_WC: Tensor, goal_W: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the largest weights reach the goal (C + 1 if all C are under it), and the last of them."""
    under_W = (descending_WC.cumsum(-1, dtype=torch.float64) < goal_W[:, None]).sum(-1)
    last_W = under_W.clamp(max=descending_WC.shape[1] - 1)
    return under_W + 1, descending_WC.gather(1, last_W[:, None])[:, 0]


def _largest(values_WU: Tensor, cutoff_W: Tensor, count_W: Tensor) -> Tensor:
    """Mask of the `count` largest values of each row, of which `cutoff` is the last; ties to the lowest ids."""
    above_WU = values_WU > cutoff_W[:, None]
    tied_WU = values_WU == cutoff_W[:, None]
    missing_W = count_W - above_WU.sum(-1)
    if (tied_WU.sum(-1) > missing_W).any():
        tied_WU &= tied_WU.cumsum(-1) <= missing_W[:, None]
    return above_WU | tied_WU


def _most_likely(text_WU: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest values of each row, largest first, ties to the lowest id, [W, count]."""
    cutoff_W = torch.topk(text_WU, count).values[:, -1]
    kept_WU = _largest(text_WU, cutoff_W, torch.full_like(cutoff_W, count, dtype=torch.int64))
    ids_WK = torch.nonzero(kept_WU)[:, 1].view(-1, count)
    order_WK = torch.argsort(text_WU.gather(1, ids_WK), dim=-1, descending=True, stable=True)
    return ids_WK.gather(1, order_WK)


def _inverse_cdf(weights_WU: Tensor, uniform_W: Tensor) -> Tensor:
    """The first id, in ascending order, whose running sum exceeds uniform * total; its weight is not 0."""
    sums_WU = weights_WU.cumsum(-1, dtype=torch.float64)
    total_W = sums_WU[:, -1]
    below_total_W = torch.nextafter(total_W, torch.zeros_like(total_W))
    goal_W = torch.minimum(uniform_W * total_W, below_total_W)
    ids_W = torch.searchsorted(sums_WU, goal_W[:, None], right=True)[:, 0]
    return ids_W.clamp(max=weights_WU.shape[1] - 1)
