"""Laws of native sampling beside those of every set: torch's results, exact shares, and bits that know only their row.

Shape suffixes: W rows, V vocabulary.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchgen_beam.kernels.native_set import NativeKernels
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.sampling import Sampled, SamplingLines
from tests.kernels.sets import HIGHEST, NATIVE, NEEDS_NATIVE, NOT_SANITIZED, native

pytestmark = NEEDS_NATIVE
PATHS = [path for dtype, path in NATIVE if dtype is torch.bfloat16]
EACH = pytest.mark.parametrize("path", PATHS)

Floats = NDArray[np.float64]

TEMPERATURES = (0.1, 0.8, 1.0, 2.0, 5.0)
TOP_K = (0, 1, 2, 40, 1 << 20)
TOP_P = (1.0, 0.95, 0.999, 0.5, 0.01)
MIX = list(itertools.product(TEMPERATURES, TOP_K, TOP_P))
LISTED = (0, 1, 5, 20)


def sampler(path: str, threads: int = 1) -> NativeKernels:
    """Sampling reads float32 whatever the dtype."""
    return native(torch.bfloat16, path, threads)


def random_logits(rows: int, vocabulary: int, spread: float = 3.0, seed: int = 0) -> Tensor:
    """Independent normal logits [W, V]."""
    return spread * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def lines(mix: list[tuple[float, int, float]]) -> SamplingLines:
    """Rows of (temperature, top_k, top_p); every seventh is greedy, and lists are of several lengths."""
    made = SamplingLines.allocate(len(mix))
    for column, values in zip((made.temperature, made.top_k, made.top_p), zip(*mix, strict=True), strict=True):
        column[:] = values
    made.greedy[:] = np.arange(len(mix)) % 7 == 6
    made.logprobs[:] = np.resize(LISTED, len(mix))
    return made


def numbers(count: int) -> Floats:
    """Numbers in [0, 1), the least and the greatest among them."""
    found = np.random.default_rng(1).random(count)
    found[:2] = [0.0, 1 - 2.0**-53][:count]
    return found


def shares(row_V: Tensor, temperature: float, top_k: int, top_p: float) -> Floats:
    """Every id's exact share, in float64 from the scaled float32 logits that the sets also have."""
    scaled = ((row_V - row_V.max()) / np.float32(temperature)).double().numpy()
    order = np.lexsort((np.arange(len(scaled)), -scaled))
    weights = np.exp(scaled)
    if 0 < top_k < len(scaled):
        weights[scaled < scaled[order[top_k - 1]]] = 0
    if top_p < 1:
        before = np.concatenate(([0.0], np.cumsum(weights[order])[:-1]))
        stays = before < top_p * weights.sum()
        stays[0] = True
        weights[order[~stays]] = 0
    return weights / weights.sum()


def assert_level(found: Sampled, wanted: Sampled, chosen: SamplingLines, uniform_W: Floats, text_WV: Tensor) -> None:
    """The same ids, but where the number lies within rounding of the border between two; close log-probabilities."""
    assert found.bad_W.tolist() == wanted.bad_W.tolist()
    apart = 0
    for w in np.flatnonzero(~found.bad_W):
        width = chosen.logprobs[w]
        assert found.top_ids_WK[w, :width].tolist() == wanted.top_ids_WK[w, :width].tolist()
        assert np.allclose(found.top_logprobs_WK[w, :width], wanted.top_logprobs_WK[w, :width], rtol=1e-6, atol=1e-5)
        if found.ids_W[w] == wanted.ids_W[w]:
            assert np.isclose(found.logprobs_W[w], wanted.logprobs_W[w], rtol=1e-6, atol=1e-5)
            continue
        apart += 1
        assert not chosen.greedy[w]
        exact = shares(text_WV[w], chosen.temperature[w], int(chosen.top_k[w]), chosen.top_p[w])
        assert exact[found.ids_W[w]] > 0
        low, high = sorted((found.ids_W[w], wanted.ids_W[w]))
        # Each weight errs by 2 ulp of float32, so that a border is known to 2^-22 of the whole.
        assert exact[:low].sum() + exact[low] == pytest.approx(uniform_W[w], rel=0, abs=1e-6)
        assert exact[low + 1 : high].sum() < 1e-6
    assert apart <= max(1, len(found.ids_W) // 50)


def compare(path: str, logits_WV: Tensor, chosen: SamplingLines, text: int) -> None:
    """Native against torch."""
    uniform_W = numbers(len(logits_WV))
    found = sampler(path).sample(logits_WV, chosen, uniform_W, text)
    wanted = TorchKernels(torch.float32).sample(logits_WV, chosen, uniform_W, text)
    assert_level(found, wanted, chosen, uniform_W, logits_WV[:, :text])


# Against torch


@EACH
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 30.0])
@pytest.mark.parametrize(("vocabulary", "text"), [(1, 1), (2, 2), (2, 1), (15, 15), (17, 16), (255, 255), (257, 256),
                                                  (1000, 983)])
def test_every_mix_of_parameters(path: str, vocabulary: int, text: int, spread: float) -> None:
    """125 mixes of temperature, top_k and top_p, in flat and in peaked rows, with padded ids and without."""
    compare(path, random_logits(len(MIX), vocabulary, spread), lines(MIX), text)


@EACH
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_a_large_vocabulary(path: str, spread: float) -> None:
    """49,152 ids of which some are padded; a nucleus of a few ids and one of nearly all."""
    mix = MIX[:: 3 if spread == 3.0 else 6]
    compare(path, random_logits(len(mix), 49152, spread), lines(mix), 49000)


@EACH
@pytest.mark.parametrize("vocabulary", [17, 600, 5000])
def test_level_logits(path: str, vocabulary: int) -> None:
    """Few distinct values, all equal, one peak, 0 beside -0: ties stay with the k-th, and go to the lowest id."""
    random = torch.Generator().manual_seed(2)
    for levels in (1, 2, 5):
        values = torch.tensor([0.0, -0.0, 1.0, -1.0, 0.5])[:levels] if levels > 1 else torch.tensor([7.0])
        rows = values[torch.randint(levels, (len(MIX), vocabulary), generator=random)]
        chosen = lines(MIX)
        chosen.top_p[chosen.top_p < 1] *= 0.987654321  # no sum of equal shares ends there
        compare(path, rows, chosen, vocabulary - 3)
    peak = torch.full((len(MIX), vocabulary), -50.0)
    peak[:, vocabulary // 2] = 40.0
    compare(path, peak, lines(MIX), vocabulary - 3)


@EACH
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e4, 1e30, 1e38])
def test_huge_and_tiny_logits(path: str, scale: float) -> None:
    """Any finite logits: differences that vanish and such that overflow."""
    compare(path, scale * random_logits(len(MIX), 1000, 1.0).clamp(-3.3, 3.3), lines(MIX), 990)


@EACH
@pytest.mark.parametrize("base", [-1e30, -3e38, 3e38])
def test_logits_far_from_zero(path: str, base: float) -> None:
    """All logits far down or far up, equal or nearly so, and one at the other end of the range."""
    rows = torch.full((len(MIX), 300), base) * (1 + random_logits(len(MIX), 300).sign() * 2.0**-22)
    rows[::2, 5] = -base
    compare(path, rows, lines(MIX), 299)


@EACH
def test_logits_that_are_level_under_a_temperature(path: str) -> None:
    """Different logits whose distance from the greatest is rounded to one number are level for top_k."""
    rows = torch.full((4, 900), -40.0)
    rows[:, 0] = 1024.0
    rows[:, 100:400] = torch.arange(300) * 1e-7
    chosen = SamplingLines.allocate(4)
    chosen.greedy[:] = False
    chosen.temperature[:] = [1e3, 700.0, 7e3, 1e5]
    chosen.top_k[:] = [2, 30, 2, 40]
    scaled = (rows - rows.max(-1, keepdim=True).values) / torch.from_numpy(chosen.temperature)[:, None]
    assert len(scaled[0].unique()) < len(rows[0].unique())
    many = np.arange(4).repeat(200)
    uniform_W = numbers(800)
    found, wanted = (kernels.sample(rows[many], chosen.take(many), uniform_W, 900)
                     for kernels in (sampler(path), TorchKernels(torch.float32)))
    assert_level(found, wanted, chosen.take(many), uniform_W, rows[many])


@EACH
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("vocabulary", [40, 1000])
def test_rows_that_are_not_finite_are_bad(path: str, value: float, vocabulary: int) -> None:
    """At any place, among the padded ids too, for any parameters; the other rows and their lists stay."""
    rows = random_logits(len(MIX), vocabulary)
    chosen, uniform_W = lines(MIX), numbers(len(MIX))
    clean = sampler(path).sample(rows, chosen, uniform_W, vocabulary - 10)
    for row in range(0, len(MIX), 2):
        rows[row, row * 7 % vocabulary] = value
    found = sampler(path).sample(rows, chosen, uniform_W, vocabulary - 10)
    assert found.bad_W.tolist() == [row % 2 == 0 for row in range(len(MIX))]
    assert ((found.ids_W >= 0) & (found.ids_W < vocabulary - 10)).all()
    for name in (field.name for field in fields(Sampled)):
        assert np.array_equal(getattr(found, name)[1::2], getattr(clean, name)[1::2])


# Shares


@EACH
@pytest.mark.parametrize("mix", [(1.0, 0, 1.0), (0.8, 0, 0.95), (0.8, 0, 1.0), (1.5, 20, 1.0), (0.5, 20, 0.9),
                                 (5.0, 0, 0.99), (2.0, 0, 0.3)])
@pytest.mark.parametrize("vocabulary", [60, 777])
def test_every_id_has_its_exact_share(path: str, mix: tuple[float, int, float], vocabulary: int) -> None:
    """Of evenly spaced numbers every id gets its share, to the last one: in ascending order it owns one interval."""
    count = 5000
    row_V = random_logits(1, vocabulary, 2.0, seed=vocabulary)[0]
    chosen = lines([mix] * count)
    chosen.greedy[:], chosen.logprobs[:] = False, 0
    rows = row_V.expand(count, -1).contiguous()
    ids_W = sampler(path).sample(rows, chosen, (np.arange(count) + 0.5) / count, vocabulary).ids_W
    assert (np.diff(ids_W) >= 0).all()
    exact = shares(row_V, *mix)
    # An interval's two ends are each known to 2^-22, far from the distance of the numbers.
    assert (np.abs(np.bincount(ids_W, minlength=vocabulary) - count * exact) <= 1 + count * 1e-6).all()
    assert (exact[ids_W] > 0).all()
    wrong = shares(row_V, mix[0] * 1.1, *mix[1:])
    assert (np.abs(np.bincount(ids_W, minlength=vocabulary) - count * wrong) > 1.5).any()


@EACH
@pytest.mark.parametrize("mix", [(0.1, 0, 1.0), (0.1, 700, 1.0), (0.1, 700, 0.999)])
def test_an_id_without_weight_is_never_drawn(path: str, mix: tuple[float, int, float]) -> None:
    """Neither by the least number nor by the greatest, where the first and the last ids have a weight of 0."""
    rows = torch.full((2, 900), -1000.0)
    rows[:, [300, 500]] = 1.0
    chosen = lines([mix] * 2)
    ids_W = sampler(path).sample(rows, chosen, np.array([0.0, 1 - 2.0**-53]), 900).ids_W
    assert ids_W.tolist() == [300, 500]


# Bits


def bits(found: Sampled, w: int, width: int) -> tuple[object, ...]:
    """All that belongs to one row."""
    return (found.ids_W[w], found.logprobs_W[w].tobytes(), found.bad_W[w], found.top_ids_WK[w, :width].tobytes(),
            found.top_logprobs_WK[w, :width].tobytes())


@EACH
@pytest.mark.parametrize("vocabulary", [1003, 49152])
def test_a_row_knows_nothing_of_its_company(path: str, vocabulary: int) -> None:
    """The same bits alone, shuffled, in other batches, at other addresses, and on one thread, two and three."""
    mix = MIX if vocabulary < 2000 else MIX[::6]
    rows, chosen, uniform_W = random_logits(len(mix), vocabulary), lines(mix), numbers(len(mix))
    widths = chosen.logprobs.tolist()

    def run(order: list[int], threads: int) -> dict[int, tuple[object, ...]]:
        index = np.array(order)
        place = torch.empty(len(order) * vocabulary + 1)[1:].view(len(order), vocabulary)
        place[:] = rows[index]
        found = sampler(path, threads).sample(place, chosen.take(index), uniform_W[index], vocabulary - 5)
        return {row: bits(found, line, widths[row]) for line, row in enumerate(order)}

    every = list(range(len(mix)))
    reference = run(every, 1)
    shuffled = np.random.default_rng(3).permutation(every).tolist()
    for threads in (1, 2, 3):
        assert run(shuffled, threads) == reference
        assert run(every[:9], threads).items() <= reference.items()
    for row in every[:: len(every) // 12]:
        assert run([row], 2)[row] == reference[row]


@EACH
def test_calls_from_several_threads(path: str) -> None:
    """Callers at once, with one thread each and with a team, and products between: the bits of one after the other."""
    rows, chosen, uniform_W = random_logits(40, 5003), lines(MIX[:40]), numbers(40)
    kernels = {threads: sampler(path, threads) for threads in (1, 2)}
    weight = kernels[1].pack([random_logits(96, 64)])
    x = random_logits(33, 64).bfloat16()

    def work(threads: int) -> tuple[object, ...]:
        product = kernels[threads].linear(x, weight)
        found = kernels[threads].sample(rows, chosen, uniform_W, 5000)
        return (*(getattr(found, field.name).tobytes() for field in fields(Sampled)), product.float().numpy().tobytes())

    alone = work(1)
    with ThreadPoolExecutor(4) as pool:
        assert all(one == alone for one in pool.map(work, [1, 2, 2, 1] * 15))


@NOT_SANITIZED
def test_memory_that_is_not_there_is_an_error() -> None:
    """A call that gets no memory raises, and the next one works."""
    kernels = sampler(HIGHEST[torch.bfloat16], 2)
    nothing = SamplingLines.allocate(0)
    with pytest.raises(MemoryError, match="native kernels"):
        kernels.sample(torch.empty(0, 1 << 50), nothing, np.zeros(0), 5)
    assert kernels.sample(torch.zeros(1, 3), SamplingLines.allocate(1), np.zeros(1), 3).ids_W.tolist() == [0]
