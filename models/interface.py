"""What a model is to the engine, and what a kernel set is to a model.

Owns the nouns that cross the border: `LayerState`, `CacheSpec`, `BatchView`, and the protocols `Model`, `Layer`
and `KernelSet`.  Does not know sequences, scheduling, random streams, files or Beam.

Shape suffixes: T tokens of a packed batch, R rows (sequences) in it, P page-table width, W wanted tokens,
L wanted tokens whose logits are needed whole, D hidden size, H query heads, G key/value heads, d head size,
V vocabulary, N outputs, K inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchgen_beam.models.caches import CacheKind, GroupKey
from batchgen_beam.models.dense import DenseDecoder
from batchgen_beam.models.experts import SILU, Activation, Expert, Routing
from batchgen_beam.models.sampling import Sampled, SamplingLines

__all__ = [
    "Activation",
    "BatchView",
    "CacheKind",
    "CacheSpec",
    "Expert",
    "Forward",
    "GroupKey",
    "KernelSet",
    "Layer",
    "LayerState",
    "Model",
    "PackedWeight",
    "Routing",
    "Scores",
    "run_layers",
]

PackedWeight = Any
"""A weight in the form that the kernel set wants; opaque to models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """One entry of a layer's cache.

    `shape` is that of one token (`paged`, `windowed`: `(G, d)`) or of one sequence (`state`).
    `window` (tokens) is given for `windowed` only: key j is visible to query i iff 0 <= i - j < window.
    Tokens' entries of dtype int8 are floats kept as int8, with one float32 scale for each head of each token.
    """

    name: str
    kind: CacheKind
    shape: tuple[int, ...]
    dtype: torch.dtype
    window: int | None = None

    def __post_init__(self) -> None:
        if (self.kind is CacheKind.WINDOWED) != (self.window is not None):
            raise ValueError(f"cache entry {self.name!r}: a window belongs to windowed entries and only to them")

    @property
    def group(self) -> GroupKey:
        """The group whose page ids this entry uses."""
        return GroupKey(self.kind, self.window)

    @property
    def is_scaled(self) -> bool:
        """Whether floats are kept as int8 with scales."""
        return self.dtype is torch.int8 and self.kind is not CacheKind.STATE

    @property
    def item_bytes(self) -> int:
        """Bytes that one token (one sequence, of kind `state`) takes, its scales included."""
        scales = prod(self.shape[:-1]) * torch.float32.itemsize if self.is_scaled else 0
        return prod(self.shape) * self.dtype.itemsize + scales


@dataclass(slots=True)
class LayerState:
    """What leaves a module at a yield point: the hidden state and named carries, one line per token."""

    hidden_TD: Tensor
    carries: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchView:
    """The packed batch of one forward pass: any mix of prefill and decode tokens, packed row by row.

    The tokens of row r are `offsets_R1[r] : offsets_R1[r + 1]`, at consecutive positions.  All KV that a token may
    see is in the pages of its row once the layer has appended the batch's own tokens.

    token_ids_T   int64; positions_T int64, 0-based place in the sequence; row_T int64, row of each token
    offsets_R1    int64, R + 1 entries
    wanted_W      int64, indices into T of the tokens that are followed by a new one
    whole_W       bool on the host: all logits of the token are needed, not only the greatest
    eligible      ids from here on are never the greatest
    page_tables   per group int64 [R, P]; unused entries are page 0, which is never written and always zero.
                  In a windowed group the entries of pages that were freed behind the window are 0 too
    state_slots_R int64, slot of each row in `state` entries (empty if the model has none)
    caches        per layer: entry name -> the whole cache tensor of that entry, in the kernel set's layout
                  (`KernelSet.allocate`)
    notes         what the kernel set worked out about this batch in one layer and can use in the next
    """

    token_ids_T: Tensor
    positions_T: Tensor
    row_T: Tensor
    offsets_R1: Tensor
    wanted_W: Tensor
    whole_W: NDArray[np.bool_]
    eligible: int
    page_tables: Mapping[GroupKey, Tensor]
    state_slots_R: Tensor
    caches: Sequence[Mapping[str, Tensor]]
    notes: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What the wanted tokens come to.

    logits_LV float32, for tokens that need them, line `line_W[w]`; where that is -1 only ids_W, the greatest eligible
    logit's id, and logprobs_W, its natural log-probability, NaN where a logit is not finite.  All but the logits are on
    the host.  Logits may lie in memory that the next pass writes to.
    """

    logits_LV: Tensor
    line_W: NDArray[np.int64]
    ids_W: NDArray[np.int64]
    logprobs_W: NDArray[np.float32]

    @classmethod
    def whole(cls, logits_WV: Tensor) -> Scores:
        """Logits of every token."""
        count = logits_WV.shape[0]
        return cls(logits_LV=logits_WV, line_W=np.arange(count), ids_W=np.zeros(count, np.int64),
                   logprobs_W=np.zeros(count, np.float32))


Forward = Callable[[BatchView], Scores]
"""A whole forward pass."""


class KernelSet(Protocol):
    """The arithmetic that models are made of.  Every method is batch invariant: a token's result bits depend on its
    own row alone, never on T, on the other tokens, or on how the row was cut into chunks.

    `recompute` says how a lost KV page is made again with the same bits: `prefill` (every token is its own row) or
    `replay` (generated tokens have to go through decode steps).  `wants_zero_pages` says whether it reads positions
    that were not written, whose pages then have to be zero before use.  `kv_dtype` is what models should declare keys
    and values as: `dtype`, or int8.
    """

    name: str
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    recompute: str
    wants_zero_pages: bool

    @property
    def threads(self) -> int:
        """Threads that compute its operations."""

    def facts(self) -> Mapping[str, object]:
        """What decides the bits: device, instruction path, tile, library versions, threads."""

    def seconds(self) -> Mapping[str, float]:
        """Seconds of all fused passes so far, by part; empty where parts are not timed."""

    def allocate(self, spec: CacheSpec, count: int, page_tokens: int) -> Tensor:
        """A zeroed cache of `count` pages of `page_tokens` tokens (or `count` state slots); index 0 of the first
        dimension is page (slot) 0, so that a page can be copied or cleared as `cache[page]`."""

    def pack(self, weights: Sequence[Tensor], *, biases: Sequence[Tensor] | None = None) -> PackedWeight:
        """`[N_i, K]` weights with equal K, stacked along N, in the kernel's own form."""

    def linear(self, x_TK: Tensor, weight: PackedWeight) -> Tensor:
        """`x @ weight.T (+ bias)`, [T, N], rounded once to the run's dtype."""

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Root mean square norm, inside in float32."""

    def rope(self, x_THd: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
        """Rotary embedding on half-split pairs (Llama convention); cos and sin are float32 [T, d / 2]."""

    def swiglu(self, gate_up_TN: Tensor, activation: Activation = SILU) -> Tensor:
        """The activation of a `[T, 2 I]` tensor whose first half is gate, inside in float32, [T, I]."""

    def experts(self, x_TD: Tensor, routing: Routing, experts: Sequence[Expert], activation: Activation, *,
                shared_TD: Tensor | None = None) -> Tensor:
        """Sum of weight times `down(activation(gate_up(x)))` over each token's experts, [T, D].

        Added in float32 in ascending id, `shared_TD` last, and rounded once.  An expert that some token goes to is
        looked up once, in ascending id, and no other is; what was looked up is valid until the next look-up.
        """

    def append(self, cache: Tensor, values_TGd: Tensor, spec: CacheSpec, view: BatchView) -> None:
        """Write each token's entry at its position into the pages of its row."""

    def attention(self, q_THd: Tensor, keys: tuple[CacheSpec, Tensor], values: tuple[CacheSpec, Tensor],
                  view: BatchView, scale: float, *, sinks_H: Tensor | None = None) -> Tensor:
        """Causal (and, by the spec, windowed) attention of each token over its row's pages in page order, [T, H, v].

        Values may come from the keys' own cache, by a spec of fewer values: the first of each entry.  `sinks_H`,
        float32, are scores of one more key for each head, whose value is 0.
        """

    def embed(self, table_VD: Tensor, token_ids_T: Tensor) -> Tensor:
        """Rows of the embedding table."""

    def head(self, x_WD: Tensor, weight: PackedWeight) -> Tensor:
        """Logits of a vocabulary or a router in float32, never rounded to a narrower type, [W, V]."""

    def pack_head(self, weight_VD: Tensor) -> PackedWeight:
        """An output projection or a router in the form that `head` wants."""

    def scores(self, x_WD: Tensor, weight: PackedWeight, view: BatchView) -> Scores:
        """What the view's wanted tokens come to; a set may give whole logits where fewer would do."""

    def sample(self, logits_LV: Tensor, lines: SamplingLines, uniform_L: NDArray[np.float64],
               text_vocabulary: int) -> Sampled:
        """The next token of each row of raw float32 logits; `lines` and `uniform_L`, in [0, 1), are of the same rows.

        Per row, in this order (vLLM v1's): raw log-probabilities; ids beyond the text vocabulary masked; greedy, or
        temperature, top_k, top_p, draw.  Ids from `text_vocabulary` on are never chosen or listed, though raw
        log-probabilities include their mass.  top_k keeps what is level with the k-th; top_p the fewest ids that reach
        its share, the lowest among equals, at least one.  The draw is the first kept id, in ascending order, at which
        the running sum of weights, in float64, exceeds `uniform` of the whole.
        """

    def fuse(self, decoder: DenseDecoder) -> Forward | None:
        """The decoder's forward pass in one call, with the bits of `run_layers`; None where that is no gain."""


class Layer(Protocol):
    """One block, with a yield point between its two halves."""

    def attention(self, x: LayerState, view: BatchView, index: int) -> LayerState:
        """Mix over the row's past and append its own entries; `index` is the layer's place in `view.caches`."""

    def feed_forward(self, x: LayerState) -> LayerState:
        """Per-token part: dense or experts."""

    def cache_spec(self) -> Sequence[CacheSpec]:
        """The entries this layer keeps, possibly none."""


class Model(Protocol):
    """An architecture with its weights."""

    vocab_size: int
    context_limit: int

    @property
    def layers(self) -> Sequence[Layer]:
        """Blocks in order."""

    def embed(self, view: BatchView) -> LayerState:
        """The state before the first layer."""

    def head(self, x: LayerState, view: BatchView) -> Scores:
        """What the wanted tokens come to; includes the final norm."""

    def forward(self, view: BatchView) -> Scores:
        """`run_layers`, or something faster with the same bits."""


def run_layers(model: Model, view: BatchView) -> Scores:
    """One whole forward pass, operation by operation."""
    state = model.embed(view)
    for index, layer in enumerate(model.layers):
        state = layer.feed_forward(layer.attention(state, view, index))
    return model.head(state, view)
