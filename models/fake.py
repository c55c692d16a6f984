"""A model without weights, one for each cache kind: exercises engine and pipeline at a few operations per token.

Every layer writes a 24-bit hash of each token into its cache, and a wanted token's logits are a function of all the
entries that it may see, read back from the cache.  So a lost, stale, foreign or twice written page (or state slot)
changes the answer.  All sums are of integers that float32 and float64 hold exactly: no order of summation shows.
Token ids are read as bytes and the answers are printable ASCII.  Does not know tokenizers, scheduling or files.

It reads its own cache, which a real model leaves to its kernel set: an entry of shape (1, 1) has one element per token
in any layout, so a flattened page is its tokens in order.

Shape suffixes: T tokens, R rows, W wanted tokens, P table width, S tokens of a page, L = P * S positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchgen_beam.config.families.fake import FakeConfig
from batchgen_beam.models.interface import (
    BatchView,
    CacheKind,
    CacheSpec,
    KernelSet,
    Layer,
    LayerState,
    Scores,
    run_layers,
)

__all__ = ["FakeModel"]

MASK = (1 << 24) - 1
"""Hashes stay in 24 bits: float32 caches hold them exactly."""

WEIGHT_BITS = 13
"""Bits of a position's weight: hash * weight summed over 2 ** 16 positions is exact in float64."""

CHOSEN = 6.0
"""Logit of the greedy token; the other printable ones lie in [0, 4), so that sampling has something to choose."""

PRINTABLE = range(32, 127)
NOISE_LINES = 64


class FakePagedLayer:
    """A layer of kind `paged` or `windowed`: one hash per token, a weighted sum over the visible ones."""

    def __init__(self, config: FakeConfig, kernels: KernelSet) -> None:
        windowed = config.kind == CacheKind.WINDOWED
        self._kernels = kernels
        self._spec = CacheSpec(name="seen", kind=CacheKind(config.kind), shape=(1, 1), dtype=torch.float32,
                               window=config.window if windowed else None)
        positions_C = torch.arange(config.max_position_embeddings, device=kernels.device)
        self._weights_C = (_hash(positions_C, positions_C, 5) % (1 << WEIGHT_BITS) + 1).double()

    def cache_spec(self) -> Sequence[CacheSpec]:
        """One number per token."""
        return (self._spec,)

    def attention(self, x: LayerState, view: BatchView, index: int) -> LayerState:
        """Append every token's hash; read back what the wanted tokens see."""
        entry_T = _hash(x.hidden_TD[:, 0], view.positions_T, index)
        cache = view.caches[index]["seen"]
        self._kernels.append(cache, entry_T.float().view(-1, 1, 1), self._spec, view)
        seen_T = torch.zeros_like(entry_T)
        seen_T[view.wanted_W] = self._read(cache, view)
        return _merged(entry_T, x.carries["seen_T"], seen_T)

    def feed_forward(self, x: LayerState) -> LayerState:
        """Nothing to add."""
        return x

    def _read(self, cache: Tensor, view: BatchView) -> Tensor:
        """Weighted sum of the visible entries of each wanted token, int64 [W]."""
        table_WP = view.page_tables[self._spec.group][view.row_T[view.wanted_W]]
        entries_WL = cache.flatten(1)[table_WP].flatten(1)[:, :self._weights_C.shape[0]]
        length = entries_WL.shape[1]
        distance_WL = view.positions_T[view.wanted_W, None] - torch.arange(length, device=cache.device)
        hidden_WL = distance_WL < 0
        if self._spec.window is not None:
            hidden_WL |= distance_WL >= self._spec.window
        sums_W = entries_WL.masked_fill(hidden_WL, 0).double() @ self._weights_C[:length]
        return sums_W.long() & MASK


class FakeStateLayer:
    """A layer of kind `state`: a running hash and the number of tokens that it has taken in, per sequence.

    A row that begins at position 0 begins with an empty state, whatever its slot holds.
    """

    def __init__(self) -> None:
        self._spec = CacheSpec(name="state", kind=CacheKind.STATE, shape=(2,), dtype=torch.float32)

    def cache_spec(self) -> Sequence[CacheSpec]:
        """Hash and count of one sequence."""
        return (self._spec,)

    def attention(self, x: LayerState, view: BatchView, index: int) -> LayerState:
        """Advance each row's state over its tokens in order; a token sees the state that includes it."""
        entry_T = _hash(x.hidden_TD[:, 0], view.positions_T, index)
        states = view.caches[index]["state"]
        first_R, last_R = view.offsets_R1[:-1], view.offsets_R1[1:] - 1
        begin_R = view.positions_T[first_R]
        old_R2 = torch.where(begin_R[:, None] == 0, 0, states[view.state_slots_R].long())
        misplaced_R = old_R2[:, 1] - begin_R  # 0 unless tokens were lost, repeated or taken out of order
        sums_T = entry_T.cumsum(0)
        before_R = old_R2[:, 0] + 7919 * misplaced_R - (sums_T - entry_T)[first_R]
        hash_T = (sums_T + before_R[view.row_T]) & MASK
        count_T = view.positions_T + 1 + misplaced_R[view.row_T]
        states[view.state_slots_R] = torch.stack((hash_T[last_R], count_T[last_R]), 1).to(states.dtype)
        return _merged(entry_T, x.carries["seen_T"], _hash(hash_T, count_T, index))

    def feed_forward(self, x: LayerState) -> LayerState:
        """Nothing to add."""
        return x


class FakeModel:
    """Implements `models.interface.Model`; `hidden_TD` is the token's hash as int64 [T, 1]."""

    def __init__(self, config: FakeConfig, kernels: KernelSet) -> None:
        self.vocab_size = config.vocab_size
        self.context_limit = config.max_position_embeddings
        self._config = config
        self._layers: list[Layer] = [
            FakeStateLayer() if config.kind == CacheKind.STATE else FakePagedLayer(config, kernels)
            for _ in range(config.num_hidden_layers)]
        self._text_ids = PRINTABLE if config.vocab_size >= PRINTABLE.stop else range(config.vocab_size)
        self._noise = self._noise_lines(kernels.device)

    @property
    def layers(self) -> Sequence[Layer]:
        """Blocks in order."""
        return self._layers

    def embed(self, view: BatchView) -> LayerState:
        """The ids themselves; the carry collects what each layer read."""
        return LayerState(view.token_ids_T[:, None], {"seen_T": torch.zeros_like(view.token_ids_T)})

    def head(self, x: LayerState, view: BatchView) -> Scores:
        """Whole logits: a line of noise, and one token above it, both chosen by what was seen."""
        seen_W = x.carries["seen_T"][view.wanted_W]
        chosen_W = self._text_ids.start + (seen_W >> 6) % len(self._text_ids)
        if self._config.eos_every and self._config.eos_token_ids:
            ends_W = (seen_W >> 3) % self._config.eos_every == 0
            chosen_W = torch.where(ends_W, self._config.eos_token_ids[0], chosen_W)
        logits_WV = self._noise[seen_W % NOISE_LINES]
        return Scores.whole(logits_WV.scatter_(1, chosen_W[:, None], CHOSEN))

    def forward(self, view: BatchView) -> Scores:
        """One pass; there is nothing to fuse."""
        return run_layers(self, view)

    def _noise_lines(self, device: torch.device) -> Tensor:
        """Printable ids in [0, 4), all others where no sampler meets them, float32 [NOISE_LINES, V]."""
        lines_1 = torch.arange(NOISE_LINES, device=device)[:, None]
        ids_V = torch.arange(self.vocab_size, device=device)
        noise = (_hash(lines_1, ids_V, 11) % 1024) / 256
        text_V = (ids_V >= self._text_ids.start) & (ids_V < self._text_ids.stop)
        text_V[list(self._config.eos_token_ids)] = False
        return torch.where(text_V, noise, -40.0).float()


def _hash(value: Tensor, place: Tensor, salt: int) -> Tensor:
    """24 bits of two integers under 2 ** 24."""
    mixed = value * 40503 + place * 27449 + salt * 7001 + 12345
    return (mixed ^ (mixed >> 11)) * 2057 & MASK


def _merged(entry_T: Tensor, before_T: Tensor, seen_T: Tensor) -> LayerState:
    """The next layer's input, and the carry with what this layer read."""
    return LayerState(entry_T[:, None], {"seen_T": _hash(seen_T, before_T, 3)})
