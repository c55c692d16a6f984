"""Laws of sampling for every set and path: the rules of each parameter, and rows that never disturb each other."""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen_beam.engine.sampler import stream_key, uniform
from batchgen_beam.models.interface import KernelSet
from batchgen_beam.models.sampling import Sampled, SamplingLines
from batchgen_beam.records import SamplingParams
from tests.kernels.sets import SAMPLERS, MakeKernels

EACH = pytest.mark.parametrize("make", SAMPLERS)
GREEDY = SamplingParams(temperature=0.0)
KINDS = [
    GREEDY,
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=5, logprobs=3),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(top_k=40, top_p=0.5, logprobs=20),
    SamplingParams(temperature=2.0, top_p=0.999),
    SamplingParams(temperature=0.0, logprobs=20),
]


def logits(rows: int, vocabulary: int, *, seed: int = 0, spread: float = 3.0) -> Tensor:
    """Random raw logits [rows, vocabulary]."""
    return spread * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def lines(params: list[SamplingParams], keys: list[str] | None = None) -> SamplingLines:
    """Lines of rows named 0, 1, 2, ..., or by `keys`."""
    made = SamplingLines.allocate(len(params))
    for slot, one in enumerate(params):
        made.put(slot, one, stream_key(one.seed, keys[slot] if keys else str(slot), 0))
    return made


def sample(kernels: KernelSet, logits_WV: Tensor, chosen: SamplingLines, places: np.ndarray, text: int) -> Sampled:
    """One step of rows at these positions."""
    return kernels.sample(logits_WV, chosen, uniform(chosen.stream, places), text)


def draw(kernels: KernelSet, logits_WV: Tensor, params: list[SamplingParams], *, position: int = 0,
         text: int | None = None) -> Sampled:
    """One step of rows named 0, 1, 2, ... at one position."""
    places = np.full(len(params), position)
    return sample(kernels, logits_WV, lines(params), places, logits_WV.shape[1] if text is None else text)


def repeated(kernels: KernelSet, row_V: Tensor, params: SamplingParams, draws: int) -> np.ndarray:
    """Ids of one row at positions 0, 1, 2, ..."""
    chosen = lines([params] * draws, ["row"] * draws)
    return sample(kernels, row_V.expand(draws, -1).contiguous(), chosen, np.arange(draws), len(row_V)).ids_W


def reference_kept(row: list[float], params: SamplingParams) -> dict[int, float]:
    """The kept ids and their probabilities, by plain loops in float64: temperature, then top_k, then top_p."""
    best = max(row)
    scaled = [np.float32(np.float32(x) - np.float32(best)) / np.float32(params.temperature) for x in row]
    kept = set(range(len(row)))
    if 0 < params.top_k < len(row):
        kth = sorted(scaled, reverse=True)[params.top_k - 1]
        kept = {i for i in kept if scaled[i] >= kth}
    weight = {i: math.exp(float(scaled[i])) for i in kept}
    total = sum(weight.values())
    before, nucleus = 0.0, set()
    for i in sorted(kept, key=lambda i: (-weight[i], i)):
        if not nucleus or before < params.top_p * total:
            nucleus.add(i)
        before += weight[i]
    mass = sum(weight[i] for i in nucleus)
    return {i: weight[i] / mass for i in sorted(nucleus)}


def reference_id(row: list[float], params: SamplingParams, number: float) -> int:
    """Inverse CDF in ascending order of ids."""
    reached = 0.0
    kept = reference_kept(row, params)
    for i, share in kept.items():
        reached += share
        if reached > number:
            return i
    return max(kept)


# Rules


@EACH
@settings(max_examples=150)
@given(values=st.lists(st.sampled_from([-9.0, -2.0, -0.5, 0.0, 0.25, 1.0, 1.5, 4.0]), min_size=2, max_size=40),
       temperature=st.sampled_from([0.3, 1.0, 2.0]), top_k=st.sampled_from([0, 1, 2, 5, 100]),
       top_p=st.sampled_from([0.0, 0.01, 0.37, 0.9, 1.0]), position=st.integers(0, 5000))
def test_the_rules_of_temperature_top_k_and_top_p(make: MakeKernels, values: list[float], temperature: float,
                                                  top_k: int, top_p: float, position: int) -> None:
    """The id is the one that plain loops in float64 draw with the same number; many logits are level."""
    kernels = make()
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    number = float(uniform(lines([params]).stream, np.array([position]))[0])
    found = draw(kernels, torch.tensor([values]), [params], position=position).ids_W[0]
    assert found == reference_id(values, params, number)


@EACH
@pytest.mark.parametrize(("params", "kept"), [
    (SamplingParams(top_k=1), {0, 2}),
    (SamplingParams(top_k=3), {0, 2, 3, 4}),
    (SamplingParams(top_p=0.29), {0}),
    (SamplingParams(top_p=0.5), {0, 2}),
    (SamplingParams(top_p=0.7), {0, 2, 3}),
    (SamplingParams(top_p=0.85), {0, 2, 3, 4}),
    (SamplingParams(top_p=0.95), {0, 1, 2, 3, 4}),
    (SamplingParams(top_k=3, top_p=0.8), {0, 2, 3}),
])
def test_ties_at_the_borders(make: MakeKernels, params: SamplingParams, kept: set[int]) -> None:
    """top_k keeps all that are level with the k-th; top_p keeps the fewest, the lowest ids among equals."""
    kernels = make()
    row = torch.tensor([0.3, 0.1, 0.3, 0.15, 0.15]).log()
    assert set(repeated(kernels, row, params, 400).tolist()) == kept


@EACH
def test_a_nucleus_larger_than_the_candidates_is_exact(make: MakeKernels) -> None:
    """A flat row of 5,000 ids, whose nucleus needs a full sort, follows the same rule."""
    kernels = make()
    params = SamplingParams(temperature=2.0, top_p=0.9)
    rows = logits(6, 5000, spread=0.5)
    numbers = uniform(lines([params] * 6).stream, np.zeros(6, int))
    wanted = [reference_id(row.tolist(), params, float(number)) for row, number in zip(rows, numbers, strict=True)]
    assert draw(kernels, rows, [params] * 6).ids_W.tolist() == wanted


@EACH
def test_greedy_takes_the_lowest_of_the_best(make: MakeKernels) -> None:
    """Greedy rows take the largest logit, the lowest id among equals, and never an id beyond the text vocabulary."""
    kernels = make()
    row = torch.tensor([[1.0, 5.0, -2.0, 5.0, 9.0]])
    assert draw(kernels, row, [GREEDY], text=4).ids_W.tolist() == [1]


@EACH
def test_ids_beyond_the_text_vocabulary_are_masked_first(make: MakeKernels) -> None:
    """Padded ids are never drawn or listed, but their mass counts in raw log-probabilities."""
    kernels = make()
    row = torch.tensor([[1.0, 2.0, 8.0]])
    one = draw(kernels, row, [SamplingParams(logprobs=2)], text=2)
    exact = torch.log_softmax(row.double(), -1)[0]
    assert one.ids_W[0] in (0, 1)
    assert one.top_ids_WK.tolist() == [[1, 0]]
    assert np.allclose(one.top_logprobs_WK[0], [exact[1], exact[0]], rtol=0, atol=1e-6)


@EACH
def test_the_distribution_is_the_softmax(make: MakeKernels) -> None:
    """20,000 positions of one stream against the exact shares: chi-square over 30 ids.

    Under the law the statistic has mean 29 and deviation sqrt(2 * 29) = 7.6; the seed is fixed, so the bound of
    29 + 5 * 7.6 = 67 is met for good or not at all, and it is missed by a wrong temperature (shown).
    """
    kernels = make()
    draws = 20_000
    row, params = logits(1, 30, spread=1.0)[0], SamplingParams(temperature=0.8)
    counts = np.bincount(repeated(kernels, row, params, draws), minlength=30)

    def statistic(temperature: float) -> float:
        expected = draws * torch.softmax(row.double() / temperature, -1).numpy()
        return float(((counts - expected) ** 2 / expected).sum())

    assert statistic(0.8) < 67
    assert statistic(0.9) > 67


# Log-probabilities


@EACH
def test_log_probabilities_are_raw(make: MakeKernels) -> None:
    """Chosen and listed values belong to the raw logits, whatever temperature and filters did; most likely first."""
    kernels = make()
    rows = logits(3, 1000)
    params = [SamplingParams(temperature=0.5, top_k=2, logprobs=5), GREEDY, SamplingParams(top_p=0.3, logprobs=2)]
    found = draw(kernels, rows, params)
    exact = torch.log_softmax(rows.double(), -1)
    # float32 sums of 1,000 positive terms, vectorised: a few units of 2^-24 relative to a logarithm under 16.
    chosen = exact.gather(1, torch.from_numpy(found.ids_W)[:, None])[:, 0]
    assert np.allclose(found.logprobs_W, chosen, rtol=0, atol=5e-6)
    for row, width in ((0, 5), (2, 2)):
        best = exact[row].topk(width)
        assert found.top_ids_WK[row, :width].tolist() == best.indices.tolist()
        assert np.allclose(found.top_logprobs_WK[row, :width], best.values, rtol=0, atol=5e-6)


@EACH
def test_listed_ties_go_to_the_lowest_id(make: MakeKernels) -> None:
    """Equal logits are listed by ascending id, and the lowest of them fill the last places; 0 and -0 are level."""
    kernels = make()
    row = torch.tensor([[0.0, 1.0, -0.0, 1.0, 3.0, 1.0, 0.0]])
    for width in range(1, 7):
        found = draw(kernels, row, [SamplingParams(temperature=0.0, logprobs=width)])
        assert found.top_ids_WK[0].tolist() == [4, 1, 3, 5, 0, 2, 6][:width]


@EACH
def test_more_log_probabilities_than_ids(make: MakeKernels) -> None:
    """A vocabulary smaller than the wanted width lists all of it."""
    kernels = make()
    found = draw(kernels, torch.tensor([[0.0, 1.0]]), [SamplingParams(logprobs=20)])
    assert found.top_ids_WK[0, :2].tolist() == [1, 0]


# Rows and their company


@EACH
@pytest.mark.parametrize("vocabulary", [300, 40_000])
def test_a_row_is_the_same_alone_and_in_any_company(make: MakeKernels, vocabulary: int) -> None:
    """All results of every kind of row, bit for bit: alone, in order, reversed, and among 29 others."""
    kernels = make()
    rows = logits(36, vocabulary, spread=2.0)
    params = [KINDS[i % len(KINDS)] for i in range(36)]
    every, places = lines(params), np.arange(36) * 3
    whole = sample(kernels, rows, every, places, vocabulary - 7)
    for chosen in ([3], [7, 6], list(range(35, -1, -1)), *([row] for row in range(len(KINDS)))):
        found = sample(kernels, rows[chosen], every.take(np.array(chosen)), places[chosen], vocabulary - 7)
        for line, row in enumerate(chosen):
            width = params[row].logprobs
            assert found.ids_W[line] == whole.ids_W[row]
            assert found.logprobs_W[line] == whole.logprobs_W[row]
            assert np.array_equal(found.top_ids_WK[line, :width], whole.top_ids_WK[row, :width])
            assert np.array_equal(found.top_logprobs_WK[line, :width], whole.top_logprobs_WK[row, :width])


@EACH
def test_a_seeded_row_ignores_mates_without_a_seed(make: MakeKernels) -> None:
    """Case 21: the same row with its seed says the same beside greedy rows, seeded rows and rows of the run's seed."""
    kernels = make()
    rows = logits(3, 500, spread=1.0)
    row = SamplingParams(seed=42)
    alone = [draw(kernels, rows[:1], [row], position=p).ids_W[0] for p in range(20)]
    for mate in (GREEDY, SamplingParams(), SamplingParams(seed=43, top_p=0.5)):
        assert [draw(kernels, rows, [row, mate, mate], position=p).ids_W[0] for p in range(20)] == alone
    assert len(set(alone)) > 10


@EACH
def test_one_seed_is_not_one_noise(make: MakeKernels) -> None:
    """Case 22: identical prompts and parameters under different ids draw differently, under equal ids equally."""
    kernels = make()
    rows = logits(1, 500, spread=1.0).expand(8, -1).contiguous()
    params, places = [SamplingParams(seed=1)] * 8, np.zeros(8, int)
    assert len(set(sample(kernels, rows, lines(params), places, 500).ids_W.tolist())) > 4
    assert len(set(sample(kernels, rows, lines(params, ["same"] * 8), places, 500).ids_W.tolist())) == 1


@EACH
@pytest.mark.parametrize("params", [
    SamplingParams(temperature=1e-4), SamplingParams(temperature=1e-8), SamplingParams(top_p=1e-4),
    SamplingParams(top_p=1e-8), SamplingParams(top_p=0.0), SamplingParams(temperature=1e-4, top_p=0.0, top_k=1),
])
def test_vanishing_temperature_and_top_p(make: MakeKernels, params: SamplingParams) -> None:
    """Case 25: nothing overflows, the nucleus is never empty: the best id is drawn, with a finite log-probability."""
    kernels = make()
    rows = logits(9, 2000, spread=40.0)
    found = draw(kernels, rows, [params] * 9)
    assert found.ids_W.tolist() == rows.argmax(-1).tolist()
    assert np.isfinite(found.logprobs_W).all()
    assert not found.bad_W.any()


@EACH
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 77, 299])
def test_a_row_of_bad_logits_is_flagged_alone(make: MakeKernels, value: float, place: int) -> None:
    """Cases 29 and B7: one logit that is not finite flags its row, whatever its parameters; no other row notices."""
    kernels = make()
    rows = logits(2 * len(KINDS), 300)
    params = KINDS * 2
    clean = draw(kernels, rows, params, text=290)
    spoilt = rows.clone()
    spoilt[: len(KINDS), place] = value
    found = draw(kernels, spoilt, params, text=290)
    assert found.bad_W.tolist() == [True] * len(KINDS) + [False] * len(KINDS)
    assert not clean.bad_W.any()
    for name in (field.name for field in fields(Sampled)):
        assert np.array_equal(getattr(found, name)[len(KINDS) :], getattr(clean, name)[len(KINDS) :])
    assert ((found.ids_W >= 0) & (found.ids_W < 290)).all()


@EACH
def test_no_rows(make: MakeKernels) -> None:
    """A step in which nobody wants a token returns no lines."""
    kernels = make()
    found = sample(kernels, torch.zeros(0, 50), SamplingLines.allocate(0), np.zeros(0, int), 50)
    assert found.ids_W.shape == (0,)
    assert found.top_ids_WK.shape == (0, 0)


