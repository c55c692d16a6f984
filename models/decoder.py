"""What all decoders have in common: pre-norm blocks between an embedding table and an output projection.

Owns the order of operations of a block (`x + attention(norm(x))`, then `x + feed_forward(norm(x))`), the embedding, the
head, and the carries with each token's rotation.  Does not know single architectures, checkpoint names, files, kernels
or where batches come from.

Shape suffixes: T tokens, W wanted tokens, D hidden size, V vocabulary, f rotated pairs, C positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from batchgen_beam.config.base import DecoderConfig
from batchgen_beam.models.interface import BatchView, CacheSpec, KernelSet, LayerState, Scores, run_layers
from batchgen_beam.models.parameters import Parameters
from batchgen_beam.models.rope import rope_tables

__all__ = ["Attention", "Block", "Decoder", "FeedForward"]


class Attention(Protocol):
    """The part of a block that looks at past tokens."""

    def cache_spec(self) -> Sequence[CacheSpec]:
        """What it keeps of each token."""

    def __call__(self, normed_TD: Tensor, carries: Mapping[str, Tensor], view: BatchView,
                 cache: Mapping[str, Tensor]) -> Tensor:
        """What is added to the hidden state, [T, D], after the batch's own entries went into `cache`."""


FeedForward = Callable[[Tensor], Tensor]
"""The part of a block that works token by token: normed [T, D] -> what is added, [T, D]."""

A = TypeVar("A", bound=Attention)
F = TypeVar("F", bound=FeedForward)


class Block(Generic[A, F]):
    """One block.  Parameters: `attention_norm`, `feed_forward_norm`, and those of `mix` and `expand`, which are built
    from the parameters under `attention.` and the block's own."""

    def __init__(self, source: Parameters, epsilon: float, mix: Callable[[Parameters], A],
                 expand: Callable[[Parameters], F]) -> None:
        self._kernels = source.kernels
        self._epsilon = epsilon
        self.attention_norm_D = source.tensor("attention_norm")
        self.mix = mix(source.under("attention"))
        self.feed_forward_norm_D = source.tensor("feed_forward_norm")
        self.expand = expand(source)

    def cache_spec(self) -> Sequence[CacheSpec]:
        """The entries of its attention."""
        return self.mix.cache_spec()

    def attention(self, x: LayerState, view: BatchView, index: int) -> LayerState:
        """The first half."""
        normed_TD = self._kernels.rms_norm(x.hidden_TD, self.attention_norm_D, self._epsilon)
        return LayerState(x.hidden_TD + self.mix(normed_TD, x.carries, view, view.caches[index]), x.carries)

    def feed_forward(self, x: LayerState) -> LayerState:
        """The second half."""
        normed_TD = self._kernels.rms_norm(x.hidden_TD, self.feed_forward_norm_D, self._epsilon)
        return LayerState(x.hidden_TD + self.expand(normed_TD), x.carries)


class Decoder(Generic[A, F]):
    """Implements `models.interface.Model`.

    Parameters: `embedding`, `layers.<i>.` (see `Block`), `norm`, `head` (untied only).  `config.head_dim` is the part
    of a head that is rotated.
    """

    def __init__(self, config: DecoderConfig, source: Parameters,
                 make_block: Callable[[Parameters, int], Block[A, F]]) -> None:
        self.vocab_size = config.vocab_size
        self.context_limit = config.max_position_embeddings
        self._kernels: KernelSet = source.kernels
        self._epsilon = config.rms_norm_eps
        self._rope = rope_tables(config.rope, config.head_dim, self.context_limit, self._kernels.device)
        self._table_VD = source.tensor("embedding")
        self._layers = [make_block(source.under(f"layers.{i}"), i) for i in range(config.num_hidden_layers)]
        self._norm_D = source.tensor("norm")
        self._head = (self._kernels.pack_head(self._table_VD) if config.tie_word_embeddings
                      else source.packed_exact("head"))

    @property
    def layers(self) -> Sequence[Block[A, F]]:
        """Blocks in order."""
        return self._layers

    def embed(self, view: BatchView) -> LayerState:
        """Token embeddings; each token's cosines and sines travel with it as carries."""
        positions_T = view.positions_T
        return LayerState(self._kernels.embed(self._table_VD, view.token_ids_T),
                          {"cos_Tf": torch.index_select(self._rope.cos_Cf, 0, positions_T),
                           "sin_Tf": torch.index_select(self._rope.sin_Cf, 0, positions_T)})

    def head(self, x: LayerState, view: BatchView) -> Scores:
        """What the wanted tokens come to."""
        wanted_WD = torch.index_select(x.hidden_TD, 0, view.wanted_W)
        normed_WD = self._kernels.rms_norm(wanted_WD, self._norm_D, self._epsilon)
        return self._kernels.scores(normed_WD, self._head, view)

    def forward(self, view: BatchView) -> Scores:
        """One pass, operation by operation."""
        return run_layers(self, view)
