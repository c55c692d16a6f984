"""How long the two halves of a model's layers take on this machine, in passes of several sizes.

Owns the passes and the clock.  Rows have pages of their own, filled with numbers, and all layers run in turn, so that
weights and keys come from memory as they do in a real pass.  Kernels may read whole pages, so an answer that sees the
first token of one stands for all that see some of it.  Where the kernel set runs a pass in one call, the parts that it
tells are taken.  Does not know configurations, plans or files.

Shape suffixes: T tokens, R rows, P pages of a row.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from batchgen_beam.engine.measured_costs import Curve, LayerTimes, Surface
from batchgen_beam.engine.paging import live_pages, pages_of
from batchgen_beam.engine.primitives import combine, cut
from batchgen_beam.engine.sampler import choose
from batchgen_beam.models.caches import GroupKey
from batchgen_beam.models.interface import BatchView, KernelSet, LayerState, Model, Scores
from batchgen_beam.models.sampling import SamplingLines
from batchgen_beam.settings import PAGE_TOKENS

__all__ = ["PassTimes", "measure_passes"]

ROWS = (1, 2, 8, 32, 128, 256)
PROMPTS = (1, 4, 8)
CHUNK = 256
"""Tokens of each prompt in a pass."""

KV_BYTES = 512 << 20
REPEATS = 3
LONG_PASS = 2.0
"""Seconds; larger passes than one that takes so long are not tried."""

_WRITTEN = 60
"""Of int8 pages, which hold their scales too: four such bytes are a float32 of 0.01."""

_ATTENTION_PARTS = ("qkv", "append", "attention", "out")
_FEED_FORWARD_PARTS = ("gate_up", "down")


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTimes:
    """For each kind of layer its times; what a pass takes beside them; a token's way through the exchange."""

    kinds: tuple[LayerTimes, ...]
    head: Curve
    combine: float


@dataclass(frozen=True, slots=True)
class _Size:
    """`rows` rows of `chunk` tokens each that follow on `past` tokens; one token: an answer's."""

    rows: int
    chunk: int
    past: int

    @property
    def tokens(self) -> int:
        return self.rows * self.chunk


@dataclass(slots=True)
class _Clock:
    """Seconds of each layer's halves, and of the head, in the passes of one size."""

    attention: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    feed_forward: defaultdict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    head: list[float] = field(default_factory=list)

    def kind(self, times: Mapping[int, Sequence[float]], layers: Sequence[int]) -> float:
        """One layer's seconds, the middle of all passes."""
        return statistics.median(statistics.fmean(of_pass) for of_pass in zip(*(times[i] for i in layers), strict=True))


def measure_passes(model: Model, kernels: KernelSet, kinds: Sequence[Sequence[int]], *,
                   clock: Callable[[], float] = time.perf_counter) -> PassTimes:
    """Times of the kinds of layers, each given by the indices of its layers, which together are the model's."""
    passes = _Passes(model, kernels, clock)
    decode = {past: passes.measure([_Size(rows, 1, past) for rows in passes.rows]) for past in passes.pasts}
    prompts = {past: passes.measure([_Size(count, passes.chunk, past) for count in PROMPTS]) for past in passes.pasts}
    first = passes.pasts[0]  # equal keys and values of a longer past would send all tokens to the same experts
    together = {**decode[first], **prompts[first]}
    return PassTimes(
        kinds=tuple(LayerTimes(decode=_surface(decode, layers, PAGE_TOKENS / 2),
                               prompt=_surface(prompts, layers, passes.chunk / 2),
                               feed_forward=Curve.of({size.tokens: one.kind(one.feed_forward, layers)
                                                      for size, one in together.items()})) for layers in kinds),
        head=Curve.of({size.rows: statistics.median(one.head) for size, one in decode[first].items()}),
        combine=passes.exchange())


def _surface(passes: Mapping[int, Mapping[_Size, _Clock]], layers: Sequence[int], beyond: float) -> Surface:
    """`beyond`: what a token sees in the mean over the tokens before its chunk."""
    (short, first), (long, second) = sorted(passes.items())
    curves = (Curve.of({size.tokens: one.kind(one.attention, layers) for size, one in part.items()})
              for part in (first, second))
    return Surface((short + beyond, long + beyond), (next(curves), next(curves)))


class _Passes:
    """The caches, and passes over them."""

    def __init__(self, model: Model, kernels: KernelSet, clock: Callable[[], float]) -> None:
        self._model, self._kernels, self._clock = model, kernels, clock
        self._groups = {spec.group for layer in model.layers for spec in layer.cache_spec()}
        token_bytes = sum(spec.item_bytes for layer in model.layers for spec in layer.cache_spec())
        self.chunk = max(1, min(CHUNK, model.context_limit // 4))
        self.pasts = 0, max(1, min(2 * CHUNK, model.context_limit // 2))
        longest = PAGE_TOKENS * pages_of(self.pasts[1] + self.chunk)
        most = max(PROMPTS[-1], min(ROWS[-1], KV_BYTES // max(1, token_bytes * longest)))
        self.rows = tuple(rows for rows in ROWS if rows <= most)
        self._pages = longest // PAGE_TOKENS
        self._caches = [{spec.name: kernels.allocate(spec, 1 + most * self._pages, PAGE_TOKENS)
                         for spec in layer.cache_spec()} for layer in model.layers]
        for cache in (cache for layer in self._caches for cache in layer.values()):
            cache[1:] = _WRITTEN if cache.dtype is torch.int8 else 1
        self._in_one_call = self._tells_parts(self._view(_Size(1, 1, 0)))

    @torch.inference_mode()
    def _tells_parts(self, view: BatchView) -> bool:
        """Whether the kernel set runs a pass of this model in one call, and tells its parts."""
        before = dict(self._kernels.seconds())
        if before:
            self._model.forward(view)
        return dict(self._kernels.seconds()) != before

    def measure(self, sizes: Sequence[_Size]) -> dict[_Size, _Clock]:
        """Passes of ascending sizes, two at least."""
        found: dict[_Size, _Clock] = {}
        for size in sizes:
            view, clock = self._view(size), _Clock()
            began = self._clock()
            for turn in range(1 + REPEATS):
                self._pass(view, clock)
                if turn and self._clock() - began > LONG_PASS * (1 + REPEATS):
                    break
            for times in (*clock.attention.values(), *clock.feed_forward.values(), clock.head):
                del times[0]  # first use of memory
            found[size] = clock
            if len(found) > 1 and self._clock() - began > LONG_PASS * (1 + REPEATS):
                break
        return found

    @torch.inference_mode()
    def _pass(self, view: BatchView, clock: _Clock) -> None:
        if not self._in_one_call:
            self._by_layers(view, clock)
            return
        before, began = dict(self._kernels.seconds()), self._clock()
        scores = self._model.forward(view)
        parts = {name: seconds - before[name] for name, seconds in self._kernels.seconds().items()}
        self._share(parts, clock)
        self._choose(scores, view)
        layers = sum(parts[name] for name in (*_ATTENTION_PARTS, *_FEED_FORWARD_PARTS))
        clock.head.append(max(0.0, self._clock() - began - layers))

    def _share(self, parts: Mapping[str, float], clock: _Clock) -> None:
        """A pass in one call: its parts, for every layer alike."""
        count = len(self._model.layers)
        for layer in range(count):
            clock.attention[layer].append(sum(parts[name] for name in _ATTENTION_PARTS) / count)
            clock.feed_forward[layer].append(sum(parts[name] for name in _FEED_FORWARD_PARTS) / count)

    def _by_layers(self, view: BatchView, clock: _Clock) -> None:
        began = self._clock()
        state = self._model.embed(view)
        beside = self._clock() - began
        for index, layer in enumerate(self._model.layers):
            start = self._clock()
            state = layer.attention(state, view, index)
            middle = self._clock()
            state = layer.feed_forward(state)
            clock.attention[index].append(middle - start)
            clock.feed_forward[index].append(self._clock() - middle)
        began = self._clock()
        self._choose(self._model.head(state, view), view)
        clock.head.append(beside + self._clock() - began)

    def _choose(self, scores: Scores, view: BatchView) -> None:
        rows = len(view.wanted_W)
        choose(self._kernels, scores, SamplingLines.allocate(rows), np.zeros(rows, np.int64), view.eligible)

    @torch.inference_mode()
    def exchange(self) -> float:
        """Seconds of a token whose sub-batch is combined with others and cut out again."""
        view = self._view(_Size(PROMPTS[-1], self.chunk, 0))
        state = self._model.embed(view)
        parts = cut(state, [self.chunk] * PROMPTS[-1])
        fresh = [LayerState(part.hidden_TD.clone(), dict(part.carries)) for part in parts]
        seconds = []
        for _ in range(1 + REPEATS):
            began = self._clock()
            cut(combine(fresh), [self.chunk] * PROMPTS[-1])
            seconds.append(self._clock() - began)
        return statistics.median(seconds[1:]) / len(view.token_ids_T)

    def _view(self, size: _Size) -> BatchView:
        """The batch of a pass; token ids run through the vocabulary."""
        positions_T = (size.past + torch.arange(size.chunk)).repeat(size.rows)
        return BatchView(
            token_ids_T=self._put(torch.arange(size.tokens) * 97 % self._model.vocab_size),
            positions_T=self._put(positions_T),
            row_T=self._put(torch.arange(size.rows).repeat_interleave(size.chunk)),
            offsets_R1=self._put(torch.arange(size.rows + 1) * size.chunk),
            wanted_W=self._put((torch.arange(size.rows) + 1) * size.chunk - 1),
            whole_W=np.zeros(size.rows, np.bool_), eligible=self._model.vocab_size,
            page_tables={group: self._put(self._table(group, size)) for group in self._groups},
            state_slots_R=self._put(torch.zeros(0, dtype=torch.int64)), caches=self._caches)

    def _table(self, group: GroupKey, size: _Size) -> torch.Tensor:
        """Each row's pages side by side; none behind a window."""
        end = size.past + size.chunk
        table_RP = 1 + torch.arange(size.rows * self._pages).view(size.rows, -1)[:, : pages_of(end)]
        return table_RP * torch.tensor([page in live_pages(group, size.past, end) for page in range(pages_of(end))])

    def _put(self, array: torch.Tensor) -> torch.Tensor:
        return array.to(self._kernels.device)
