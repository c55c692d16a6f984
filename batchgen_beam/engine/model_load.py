"""What a pass over a model reads and computes, layer by layer, in plain numbers.

Owns the step from sizes to loads: equal layers become equal loads, whatever their names.  Does not know machines.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchgen_beam.config.sizes import DTYPE_BYTES, LayerSizes, ModelSizes, WeightForm
from batchgen_beam.engine.paging import pages_of, useful_pages
from batchgen_beam.settings import PAGE_TOKENS

__all__ = ["LayerLoad", "ModelLoad"]

_FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLoad:
    """One layer: bytes of its parts, operations of one token in them, bytes of its state.

    `fixed` is what every token passes in the feed-forward half; `context_flops` are for one token and one token of its
    past; `*_width` is what a token's state takes in each half, in bytes.
    """

    attention_bytes: int
    attention_flops: int
    context_flops: int
    fixed_bytes: int
    fixed_flops: int
    expert_bytes: int = 0
    expert_flops: int = 0
    experts: int = 0
    experts_per_token: int = 0
    kv_token_bytes: int = 0
    window: int | None = None
    state_bytes: int = 0
    attention_width: int = 0
    feed_forward_width: int = 0

    @property
    def feed_forward_bytes(self) -> int:
        """Weights of the whole half."""
        return self.fixed_bytes + self.experts * self.expert_bytes

    def kv_bytes(self, rows: int, tokens: int, context: int) -> int:
        """What is kept of rows of so many tokens, `context` at most, in whole pages, as `page_budget` counts them."""
        pages = min(rows * pages_of(tokens), useful_pages(self.window, rows, context))
        return pages * PAGE_TOKENS * self.kv_token_bytes + rows * self.state_bytes

    def seen(self, tokens: float) -> float:
        """Tokens of the past that attention looks at."""
        return tokens if self.window is None else min(tokens, self.window)

    def touched(self, tokens: int) -> float:
        """Expected number of distinct experts that `tokens` tokens choose, each as likely as the other."""
        if not self.experts:
            return 0.0
        return self.experts * (1.0 - (1.0 - self.experts_per_token / self.experts) ** tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLoad:
    """All layers, and the embedding and head around them.

    `context`: tokens that a row may have at most; `state_width`: bytes of a token's state between layers.
    """

    layers: tuple[LayerLoad, ...]
    embedding_bytes: int
    head_bytes: int
    head_flops: int
    vocabulary: int
    context: int
    state_width: int

    @classmethod
    def of(cls, sizes: ModelSizes, form: WeightForm, kv_dtype: str) -> ModelLoad:
        """The load of a model whose weights are kept in `form`."""
        kept = form.dtype if kv_dtype == "auto" else kv_dtype
        return cls(layers=tuple(_layer(layer, sizes.hidden, form, kept) for layer in sizes.layers),
                   embedding_bytes=sizes.embedding.bytes(form),
                   head_bytes=sizes.head_bytes(form), head_flops=sizes.head_flops, vocabulary=sizes.vocabulary,
                   context=sizes.context, state_width=sizes.hidden * DTYPE_BYTES[form.dtype])

    @property
    def weight_bytes(self) -> int:
        """All weights."""
        return self.embedding_bytes + self.head_bytes + sum(
            layer.attention_bytes + layer.feed_forward_bytes for layer in self.layers)

    def kv_bytes(self, rows: int, tokens: int) -> int:
        """What all layers keep of rows of so many tokens."""
        return sum(layer.kv_bytes(rows, tokens, self.context) for layer in self.layers)


def _layer(layer: LayerSizes, hidden: int, form: WeightForm, kv_dtype: str) -> LayerLoad:
    number = DTYPE_BYTES[form.dtype]
    return LayerLoad(
        attention_bytes=layer.attention.bytes(form), attention_flops=layer.attention.flops,
        context_flops=layer.context_flops, fixed_bytes=layer.fixed_bytes(form),
        fixed_flops=layer.feed_forward_flops - layer.experts_per_token * layer.expert.flops,
        expert_bytes=layer.expert.bytes(form), expert_flops=layer.expert.flops, experts=layer.experts,
        experts_per_token=layer.experts_per_token, kv_token_bytes=layer.cache.token_bytes(kv_dtype),
        window=layer.cache.window, state_bytes=_FLOAT32 * layer.cache.state, attention_width=number * layer.width,
        feed_forward_width=_FLOAT32 * hidden + number * (hidden + 3 * layer.inner * max(1, layer.experts_per_token)))
