"""YIELD and COMBINE inside a forward pass: attention in sub-batches, all that goes token by token over many of them.

Owns the coroutine of a sub-batch, which is suspended at every layer's yield point with its state as plain tensors, and
the exchange in which suspended sub-batches become one batch for the feed-forward part or the experts.  All sub-batches
meet in every layer, so that its weights are needed once per pass, or once for each part that B_moe cuts.  Decides no
size and knows no sequences: a kernel set's results don't depend on what a token is computed with, so the sizes reach no
bit.

Shape suffixes as in `models.interface`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from batchgen_beam.models.interface import BatchView, Layer, LayerState, Model, Scores
from batchgen_beam.settings import EngineSettings

__all__ = ["WHOLE", "SubBatch", "SubBatching", "combine", "combined_forward", "cut", "split_rows", "sub_batch"]

SubBatch = Generator[LayerState, LayerState, None]
"""Gives its state after each layer's attention, and is sent that state after the layer's feed-forward part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubBatching:
    """Sizes of one pass: `attention` rows (B_attn) in a sub-batch, `expert` tokens (B_moe) combined; 0: all."""

    attention: int = 0
    expert: int = 0

    def __post_init__(self) -> None:
        if self.attention < 0 or self.expert < 0:
            raise ValueError(f"a sub-batch has at least one row or token, or 0 for all; got {self}")

    @classmethod
    def of(cls, settings: EngineSettings) -> SubBatching:
        """What the settings say."""
        return cls(attention=settings.attention_batch, expert=settings.expert_batch)

    @property
    def is_whole(self) -> bool:
        """Whether nothing is split."""
        return not (self.attention or self.expert)


WHOLE = SubBatching()
"""Nothing split: the model's own way."""


def sub_batch(layers: Sequence[Layer], state: LayerState, view: BatchView) -> SubBatch:
    """One sub-batch's way through the layers; YIELD leaves everything that it needs later in what it gives."""
    for index, layer in enumerate(layers):
        state = yield layer.attention(state, view, index)


def combine(states: Sequence[LayerState]) -> LayerState:
    """The tokens of all states as one, in order; the states carry the same names."""
    if len(states) == 1:
        return states[0]
    names = states[0].carries
    assert all(state.carries.keys() == names.keys() for state in states)
    return LayerState(torch.cat([state.hidden_TD for state in states]),
                      {name: torch.cat([state.carries[name] for state in states]) for name in names})


def cut(state: LayerState, sizes: Sequence[int]) -> list[LayerState]:
    """The state's tokens again in parts of `sizes` tokens, which add up to all; parts share the state's memory."""
    if len(sizes) == 1:
        return [state]
    carries = {name: carry.split(list(sizes)) for name, carry in state.carries.items()}
    return [LayerState(hidden_TD, {name: parts[index] for name, parts in carries.items()})
            for index, hidden_TD in enumerate(state.hidden_TD.split(list(sizes)))]


def split_rows(view: BatchView, rows: int) -> list[BatchView]:
    """The batch as batches of `rows` rows, the last one of what is left; 0: as it is."""
    count = len(view.offsets_R1) - 1
    if not rows or count <= rows:
        return [view]
    offsets, wanted = view.offsets_R1.cpu(), view.wanted_W.cpu()
    borders = [*range(0, count, rows), count]
    tokens = offsets[borders]
    answers = torch.searchsorted(wanted, tokens).tolist()
    return [_rows(view, row, token, answer) for row, token, answer in zip(
        pairwise(borders), pairwise(tokens.tolist()), pairwise(answers), strict=True)]


def _rows(view: BatchView, row: tuple[int, int], token: tuple[int, int], answer: tuple[int, int]) -> BatchView:
    """Some rows of a batch, given by their borders among its rows, its tokens and its wanted tokens."""
    rows, tokens, answers = slice(*row), slice(*token), slice(*answer)
    return replace(
        view,
        token_ids_T=view.token_ids_T[tokens],
        positions_T=view.positions_T[tokens],
        row_T=view.row_T[tokens] - row[0],
        offsets_R1=view.offsets_R1[row[0] : row[1] + 1] - token[0],
        wanted_W=view.wanted_W[answers] - token[0],
        whole_W=view.whole_W[answers],
        page_tables={group: table[rows] for group, table in view.page_tables.items()},
        state_slots_R=view.state_slots_R[rows],
        notes={},
    )


def combined_forward(model: Model, view: BatchView, sizes: SubBatching) -> Scores:
    """One pass over the batch with the bits of `run_layers`.

    Every layer runs its attention once per sub-batch and its feed-forward part once per `sizes.expert` tokens of all.
    """
    views = split_rows(view, sizes.attention)
    counts = [len(part.token_ids_T) for part in views]
    parts = [sub_batch(model.layers, state, part)
             for state, part in zip(cut(model.embed(view), counts), views, strict=True)]
    yielded = [next(part) for part in parts]
    for layer in model.layers[:-1]:
        states = cut(_feed_forward(layer, combine(yielded), sizes.expert), counts)
        yielded = [part.send(state) for part, state in zip(parts, states, strict=True)]
    return model.head(_feed_forward(model.layers[-1], combine(yielded), sizes.expert), view)


def _feed_forward(layer: Layer, state: LayerState, tokens: int) -> LayerState:
    count = len(state.hidden_TD)
    if not tokens or count <= tokens:
        return layer.feed_forward(state)
    sizes = [min(tokens, count - start) for start in range(0, count, tokens)]
    return combine([layer.feed_forward(part) for part in cut(state, sizes)])
