"""Laws of timing layers: what comes out is what each kind took, rows have pages of their own, long passes end it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest
import torch

from batchgen_beam.config.model_registry import load_config
from batchgen_beam.engine.layer_times import KV_BYTES, LONG_PASS, PROMPTS, ROWS, measure_passes
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.interface import (
    BatchView,
    CacheKind,
    CacheSpec,
    KernelSet,
    LayerState,
    Model,
    Scores,
    run_layers,
)
from batchgen_beam.settings import PAGE_TOKENS
from batchgen_beam.weights.random_model import random_model
from tests.faults.job import write_tiny_model
from tests.kernels.sets import HIGHEST, NEEDS_NATIVE, native

WINDOW = 100
FIRST = 0.125
"""What the first pass of a size takes longer in each half of a layer."""


class Work:
    """A clock that only stands still or is told to go on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sizes: set[tuple[object, ...]] = set()
        self.views: list[BatchView] = []

    def __call__(self) -> float:
        return self.now

    def take(self, seconds: float, what: str, view: BatchView | None, tokens: int) -> None:
        """Go on, the longer where the size is new."""
        size = what, tokens, None if view is None else int(view.positions_T[0])
        self.now += seconds + FIRST * (size not in self.sizes)
        self.sizes.add(size)


class WorkingLayer:
    """A layer whose attention takes `price` for each token and token of its past, its feed-forward part twice that."""

    def __init__(self, clock: Work, price: float, spec: CacheSpec) -> None:
        self._clock, self._price, self._spec = clock, price, spec
        self._view: BatchView | None = None

    def cache_spec(self) -> Sequence[CacheSpec]:
        return (self._spec,)

    def attention(self, x: LayerState, view: BatchView, index: int) -> LayerState:
        assert view.caches[index][self._spec.name][1:].count_nonzero()
        self._view = view
        self._clock.views.append(view)
        past = int(view.positions_T[0])
        self._clock.take(self._price * len(x.hidden_TD) * (1 + past), f"attention {id(self)}", view, len(x.hidden_TD))
        return x

    def feed_forward(self, x: LayerState) -> LayerState:
        self._clock.take(2 * self._price * len(x.hidden_TD), f"feed-forward {id(self)}", self._view, len(x.hidden_TD))
        return x


class WorkingModel:
    """Two cheap layers around a dear one, and a head of a millisecond."""

    vocab_size, context_limit = 50, 1000

    def __init__(self, clock: Work, price: float, spec: CacheSpec) -> None:
        self._clock = clock
        self.layers = [WorkingLayer(clock, price * factor, spec) for factor in (1, 3, 1)]
        self.whole_passes = 0

    def embed(self, view: BatchView) -> LayerState:
        return LayerState(view.token_ids_T[:, None].float())

    def head(self, x: LayerState, view: BatchView) -> Scores:
        self._clock.now += 0.0009765625
        return Scores.whole(torch.zeros(len(view.wanted_W), self.vocab_size))

    def forward(self, view: BatchView) -> Scores:
        self.whole_passes += 1
        return run_layers(self, view)


def spec(window: int | None = None, size: int = 4) -> CacheSpec:
    """An entry of `size` float32 numbers for each token."""
    kind = CacheKind.PAGED if window is None else CacheKind.WINDOWED
    return CacheSpec(name="k", kind=kind, shape=(1, size), dtype=torch.float32, window=window)


def test_each_kind_takes_what_its_layers_took() -> None:
    """By tokens and context, for answers and prompts, in the order of the kinds; a size's first pass does not count."""
    clock, price = Work(), 2.0**-30
    model = WorkingModel(clock, price, spec())
    found = measure_passes(model, TorchKernels(torch.float32), [[0, 2], [1]], clock=clock)
    for factor, times in zip((1, 3), found.kinds, strict=True):
        assert times.decode.contexts == (32.0, 532.0)
        assert times.prompt.contexts == (125.0, 625.0)
        for past, curve in zip((0, 500), times.decode.curves, strict=True):
            assert curve.tokens == ROWS
            assert curve.seconds == pytest.approx([factor * price * rows * (1 + past) for rows in ROWS], rel=1e-6)
        for past, curve in zip((0, 500), times.prompt.curves, strict=True):
            assert curve.tokens == tuple(250 * count for count in PROMPTS)
            assert curve.seconds == pytest.approx([factor * price * one * (1 + past) for one in curve.tokens], rel=1e-6)
        assert set(times.feed_forward.tokens) == {*ROWS, *(250 * count for count in PROMPTS)}
        assert times.feed_forward.seconds == pytest.approx(
            [factor * 2 * price * one for one in times.feed_forward.tokens], rel=1e-6)
    assert found.head.seconds == pytest.approx([0.0009765625] * len(ROWS))
    assert found.combine == 0.0


class PagedLayer(WorkingLayer):
    """A layer whose attention takes `price` for each token and page that it sees some of."""

    def attention(self, x: LayerState, view: BatchView, index: int) -> LayerState:
        pages = 1 + int(view.positions_T[-1]) // PAGE_TOKENS
        self._view = view
        self._clock.take(self._price * len(x.hidden_TD) * pages, f"attention {id(self)}", view, len(x.hidden_TD))
        return x


def test_whole_pages_that_are_read_are_spread_over_all_lengths() -> None:
    """Of 1 to 512 tokens of a row, each as likely as the others, the mean is what the lines between say."""
    clock = Work()
    model = WorkingModel(clock, 2.0**-20, spec())
    model.layers, model.context_limit = [PagedLayer(clock, 2.0**-20, spec())], 4096
    decode = measure_passes(model, TorchKernels(torch.float32), [[0]], clock=clock).kinds[0].decode
    lengths = range(1, 513)
    mean = sum(8 * 2.0**-20 * -(-length // PAGE_TOKENS) for length in lengths) / len(lengths)
    assert sum(decode.at(8, length) for length in lengths) / len(lengths) == pytest.approx(mean, rel=0.03)


@pytest.mark.parametrize("window", [None, WINDOW])
def test_rows_have_their_own_pages(window: int | None) -> None:
    """No two rows of a pass share a page, every position that a row sees has one, and none lies behind a window."""
    clock = Work()
    measure_passes(WorkingModel(clock, 0.0, spec(window)), TorchKernels(torch.float32), [[0, 1, 2]], clock=clock)
    for view in clock.views:
        (table_RP,) = view.page_tables.values()
        pages = table_RP[table_RP > 0].tolist()
        assert len(pages) == len(set(pages))
        first, last = int(view.positions_T[0]), int(view.positions_T[-1])
        seen = range(0 if window is None else max(0, first - window + 1) // PAGE_TOKENS, last // PAGE_TOKENS + 1)
        for row in table_RP.tolist():
            assert [place for place, page in enumerate(row) if page] == list(seen)
        assert int(table_RP.max()) < len(view.caches[0]["k"])
        assert (view.wanted_W + 1).tolist() == view.offsets_R1[1:].tolist()


def test_a_limit_of_cache_memory_leaves_large_batches_out() -> None:
    """Rows whose keys and values do not fit together are not tried; what prompts need always is."""
    clock = Work()
    model = WorkingModel(clock, 2.0**-30, spec(size=KV_BYTES // 4 // 3 // 800 // 20))
    found = measure_passes(model, TorchKernels(torch.float32), [[0, 1, 2]], clock=clock)
    assert found.kinds[0].decode.curves[0].tokens == tuple(rows for rows in ROWS if rows <= 20)


def test_passes_that_take_long_are_the_last_ones() -> None:
    """After one of `LONG_PASS` seconds no larger one is tried, but two sizes always are."""
    clock = Work()
    price = LONG_PASS / 12 / 32
    found = measure_passes(WorkingModel(clock, price, spec()), TorchKernels(torch.float32), [[0, 2], [1]], clock=clock)
    times = found.kinds[0]
    assert times.decode.curves[0].tokens == ROWS[:4]
    assert times.decode.curves[0].seconds[-1] == pytest.approx(32 * price)
    assert times.decode.curves[1].tokens == ROWS[:2]
    assert times.prompt.curves[0].tokens == (250, 1000)


def tiny(folder: Path, kernels: KernelSet) -> Model:
    """A random Llama."""
    return random_model(load_config(str(write_tiny_model(folder))), kernels, seed=1, room=1 << 40)


def test_a_real_model_is_timed(tmp_path: Path) -> None:
    """All of a Llama's passes run on the torch set, and each half of each layer is timed apart: of a clock that goes on
    by a tick at each reading it takes one, what is before and behind the layers two."""
    kernels, tick, readings = TorchKernels(torch.float32), 2.0**-10, count()
    found = measure_passes(tiny(tmp_path, kernels), kernels, [[0, 1]], clock=lambda: tick * next(readings))
    (times,) = found.kinds
    for curve in (*times.decode.curves, *times.prompt.curves, times.feed_forward):
        assert set(curve.seconds) == {tick}
    assert set(found.head.seconds) == {2 * tick}
    assert times.decode.curves[0].tokens == ROWS


@NEEDS_NATIVE
def test_a_pass_that_is_not_fused_runs_once() -> None:
    """Whether the kernel set tells the parts of a pass is found out by a single one, not by each."""
    clock = Work()
    model = WorkingModel(clock, 2.0**-30, spec())
    kernels = native(torch.float32, HIGHEST[torch.float32])
    found = measure_passes(model, kernels, [[0, 2], [1]], clock=clock)
    assert model.whole_passes == 1
    assert found.head.seconds == pytest.approx([0.0009765625] * len(ROWS))


@NEEDS_NATIVE
def test_a_pass_in_one_call_tells_its_parts(tmp_path: Path) -> None:
    """They are taken from the kernel set, so a clock that stands still does not matter."""
    kernels = native(torch.float32, HIGHEST[torch.float32])
    found = measure_passes(tiny(tmp_path, kernels), kernels, [[0, 1]], clock=lambda: 0.0)
    (times,) = found.kinds
    for curve in (*times.decode.curves, *times.prompt.curves, times.feed_forward):
        assert min(curve.seconds) > 0
