"""YIELD and COMBINE inside a forward pass: the same bits, by exactly the calls that the sizes ask for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import pytest
import torch

from batchgen_beam.engine.primitives import SubBatching, combine, combined_forward, cut, split_rows, sub_batch
from batchgen_beam.models.interface import BatchView, CacheSpec, LayerState, Model, Scores
from tests.models.paged import PagedRun
from tests.models.test_cache_kinds import KERNELS, KINDS, make

ROWS = {name: list(range(40, 40 + length)) for name, length in (("a", 1), ("b", 9), ("c", 3), ("d", 1), ("e", 6))}
TOKENS = sum(map(len, ROWS.values()))
SIZES = [(attention, expert) for attention in (1, 2, 3, 8, 0) for expert in (1, 7, 16, 0)]


class Watched:
    """A model whose forward pass is in sub-batches, and the calls of its layers: (layer, part, rows, tokens)."""

    def __init__(self, model: Model, sizes: SubBatching) -> None:
        self.vocab_size, self.context_limit = model.vocab_size, model.context_limit
        self.calls: list[tuple[int, str, int, int]] = []
        self._model, self._sizes = model, sizes
        self.layers = [WatchedLayer(self, index) for index in range(len(model.layers))]

    @property
    def model(self) -> Model:
        """The model itself."""
        return self._model

    def embed(self, view: BatchView) -> LayerState:
        """The model's own."""
        return self._model.embed(view)

    def head(self, x: LayerState, view: BatchView) -> Scores:
        """The model's own."""
        return self._model.head(x, view)

    def forward(self, view: BatchView) -> Scores:
        """In sub-batches."""
        return combined_forward(self, view, self._sizes)


class WatchedLayer:
    """A layer that notes its calls."""

    def __init__(self, owner: Watched, index: int) -> None:
        self._owner, self._index = owner, index
        self._layer = owner.model.layers[index]

    def cache_spec(self) -> Sequence[CacheSpec]:
        """The layer's own."""
        return self._layer.cache_spec()

    def attention(self, x: LayerState, view: BatchView, index: int) -> LayerState:
        """The layer's own."""
        self._owner.calls.append((self._index, "attention", len(view.offsets_R1) - 1, len(x.hidden_TD)))
        return self._layer.attention(x, view, index)

    def feed_forward(self, x: LayerState) -> LayerState:
        """The layer's own."""
        self._owner.calls.append((self._index, "feed_forward", 0, len(x.hidden_TD)))
        return self._layer.feed_forward(x)


def parts(count: int, size: int) -> list[int]:
    """`count` in parts of `size`, 0: in one."""
    size = size or count
    return [min(size, count - start) for start in range(0, count, size)]


@pytest.mark.parametrize(("attention", "expert"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_sizes_reach_no_bit(kind: str, attention: int, expert: int) -> None:
    """Prompts and decode steps in sub-batches of any size have the logits of the whole batch, bit for bit."""
    whole = PagedRun(make(kind), KERNELS)
    split = PagedRun(Watched(make(kind), SubBatching(attention=attention, expert=expert)), KERNELS)
    for chunks in (list(ROWS.items()), [("a", [7]), ("b", [8]), ("c", [9, 10, 11]), ("d", [12]), ("e", [13])]):
        for every in (True, False):
            assert torch.equal(whole.forward(*chunks, every=every), split.forward(*chunks, every=every))


@pytest.mark.parametrize(("attention", "expert"), SIZES)
def test_each_part_runs_as_often_as_computed(attention: int, expert: int) -> None:
    """In each layer: attention once per sub-batch of rows, then the feed-forward part once per share of the tokens of
    all; no layer begins before the last one has ended for all."""
    watched = Watched(make("llama"), SubBatching(attention=attention, expert=expert))
    PagedRun(watched, KERNELS).forward(*ROWS.items())
    lengths, expected = list(map(len, ROWS.values())), []
    for layer in range(len(watched.layers)):
        start = 0
        for rows in parts(len(ROWS), attention):
            expected.append((layer, "attention", rows, sum(lengths[start : start + rows])))
            start += rows
        expected += [(layer, "feed_forward", 0, tokens) for tokens in parts(TOKENS, expert)]
    assert watched.calls == expected


def test_rows_keep_their_wanted_tokens() -> None:
    """A sub-batch in which no token is wanted is a batch like any other, and wanted tokens stay with their rows."""
    model = make("paged")
    rows = [("a", [1, 2, 3]), ("b", [4]), ("c", [5, 6]), ("d", [7])]
    view = PagedRun(model, KERNELS).view(rows, torch.tensor([3, 6]))
    split = split_rows(view, 1)
    assert [part.wanted_W.tolist() for part in split] == [[], [0], [], [0]]
    assert [part.token_ids_T.tolist() for part in split] == [ids for _, ids in rows]
    assert [part.row_T.tolist() for part in split] == [[0] * len(ids) for _, ids in rows]
    assert [len(part.whole_W) for part in split] == [0, 1, 0, 1]


def test_a_suspended_sub_batch_is_data() -> None:
    """Between two layers nothing but the yielded state is needed: a copy of it, sent later, gives the same result."""
    model = make("llama")
    rows = list(ROWS.items())
    expected = PagedRun(model, KERNELS).forward(*rows)
    view = PagedRun(model, KERNELS).view(rows, torch.tensor([len(ids) for _, ids in rows]).cumsum(0) - 1)
    state = model.embed(view)
    coroutine = sub_batch(model.layers, state, view)
    given = next(coroutine)
    for layer in model.layers:
        kept = LayerState(given.hidden_TD.clone(), {name: carry.clone() for name, carry in given.carries.items()})
        given.hidden_TD.fill_(float("nan"))
        state = layer.feed_forward(kept)
        with suppress(StopIteration):
            given = coroutine.send(state)
    with pytest.raises(StopIteration):
        next(coroutine)
    assert torch.equal(model.head(state, view).logits_LV, expected)


def test_combine_and_cut_are_inverse() -> None:
    """What was combined comes back in its parts, the carries with it."""
    states = [LayerState(torch.full((n, 2), float(n)), {"x": torch.full((n, 3), n)}) for n in (3, 1, 4)]
    back = cut(combine(states), [3, 1, 4])
    for one, other in zip(states, back, strict=True):
        assert torch.equal(one.hidden_TD, other.hidden_TD)
        assert torch.equal(one.carries["x"], other.carries["x"])


def test_sizes_below_zero_are_refused() -> None:
    """There is no sub-batch of less than nothing."""
    with pytest.raises(ValueError, match="at least one row"):
        SubBatching(attention=-1)
