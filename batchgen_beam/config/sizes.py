"""What the parts of a model take and cost: parameters, bytes, products per token.

Owns the nouns and the arithmetic on them.  Does not know families (`model_sizes` does), machines or plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from batchgen_beam.config.quantization import Quantization
from batchgen_beam.config.stored_bytes import is_plain, matrix_bytes

__all__ = ["DTYPE_BYTES", "NO_PART", "Cache", "LayerSizes", "Matrix", "ModelSizes", "Part", "WeightForm"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightForm:
    """What weights are kept as: in `dtype`, or where `stored` says so, as their checkpoint stores them.

    `exact` numbers (sinks, biases of routers, recurrent states' constants) are float32 either way.  `head`: the output
    projection and routers are kept in that dtype, the projection apart from the embedding even where it is tied to it.
    """

    dtype: str
    stored: Quantization | None = None
    head: str | None = None

    def matrix(self, module: str, matrix: Matrix) -> int:
        """Bytes of the matrix itself, without its bias."""
        if matrix.exact and self.head is not None:
            return matrix.outputs * matrix.inputs * DTYPE_BYTES[self.head]
        if self.stored is None or matrix.plain or is_plain(self.stored, f"{module}.{matrix.name}"):
            return matrix.outputs * matrix.inputs * DTYPE_BYTES[self.dtype]
        return matrix_bytes(self.stored, matrix.outputs, matrix.inputs)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [outputs, inputs] that a token is multiplied with; `plain`: never stored quantised; `exact`: with a
    product that is never rounded (a router's)."""

    name: str
    outputs: int
    inputs: int
    bias: bool = False
    plain: bool = False
    exact: bool = False


@dataclass(frozen=True)
class Part:
    """Weights that are read together, and what a token that passes them costs.

    `module` is the path that quantisation's exceptions are matched with.  `numbers` are norms and the like, in the
    model's dtype; `exact` are kept in float32.
    """

    module: str = ""
    matrices: tuple[Matrix, ...] = ()
    numbers: int = 0
    exact: int = 0

    @cached_property
    def parameters(self) -> int:
        """How many numbers it has."""
        own = sum(one.outputs * one.inputs + one.bias * one.outputs for one in self.matrices)
        return own + self.numbers + self.exact

    @cached_property
    def flops(self) -> int:
        """Operations for one token, a multiplication and an addition for each weight."""
        return 2 * sum(one.outputs * one.inputs for one in self.matrices)

    def bytes(self, form: WeightForm) -> int:
        """What it takes when kept in `form`."""
        biases = sum(one.bias * one.outputs for one in self.matrices)
        plain = DTYPE_BYTES[form.dtype] * (self.numbers + biases) + 4 * self.exact
        return plain + sum(form.matrix(self.module, one) for one in self.matrices)


NO_PART = Part()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """What a layer keeps of the past: `values` and `heads` (vectors with a scale of their own in int8) for each token.

    `window`: at most so many tokens; `state`: float32 numbers for each sequence, whatever its length.
    """

    values: int = 0
    heads: int = 0
    window: int | None = None
    state: int = 0

    def token_bytes(self, kv_dtype: str) -> int:
        """Bytes of one token; int8 vectors have a float32 scale."""
        if kv_dtype == "int8":
            return self.values + 4 * self.heads
        return self.values * DTYPE_BYTES[kv_dtype]


@dataclass(frozen=True, kw_only=True)
class LayerSizes:
    """One block.  `dense` is what every token passes of the feed-forward half, router and shared experts apart.

    A token passes `experts_per_token` of `experts` experts.  `context_flops` are those of one token with one token of
    its past, `width` what a token's state in the attention half takes at its widest, in numbers.
    """

    attention: Part
    cache: Cache
    context_flops: int
    width: int
    dense: Part = NO_PART
    router: Part = NO_PART
    shared: Part = NO_PART
    expert: Part = NO_PART
    experts: int = 0
    experts_per_token: int = 0
    inner: int = 0

    @cached_property
    def parameters(self) -> int:
        """All of the block's."""
        return sum(part.parameters for part in self._always) + self.experts * self.expert.parameters

    @cached_property
    def active_parameters(self) -> int:
        """Those that one token meets."""
        return sum(part.parameters for part in self._always) + self.experts_per_token * self.expert.parameters

    @property
    def _always(self) -> tuple[Part, ...]:
        return self.attention, self.dense, self.router, self.shared

    @cached_property
    def feed_forward_flops(self) -> int:
        """Operations of one token in the feed-forward half."""
        return sum(part.flops for part in self._always[1:]) + self.experts_per_token * self.expert.flops

    def fixed_bytes(self, form: WeightForm) -> int:
        """What of the feed-forward half every pass reads."""
        return sum(part.bytes(form) for part in self._always[1:])

    def bytes(self, form: WeightForm) -> int:
        """The whole block."""
        return sum(part.bytes(form) for part in self._always) + self.experts * self.expert.bytes(form)


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """A model whose rows have at most `context` tokens.

    A tied head has no weights of its own, but costs its products all the same (`head_flops`).
    """

    hidden: int
    vocabulary: int
    context: int
    embedding: Part
    head: Part
    layers: tuple[LayerSizes, ...]

    @property
    def head_flops(self) -> int:
        """Operations for the logits of one token."""
        return 2 * self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """All that a pass may use; layers that predict further tokens are none of it."""
        return sum(part.parameters for part in self._parts()) + sum(layer.parameters for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """Those that one token meets, embedding and head included."""
        return sum(part.parameters for part in self._parts()) + sum(one.active_parameters for one in self.layers)

    def bytes(self, form: WeightForm) -> int:
        """All weights."""
        return self.embedding.bytes(form) + self.head_bytes(form) + sum(layer.bytes(form) for layer in self.layers)

    def head_bytes(self, form: WeightForm) -> int:
        """The output projection and the last norm."""
        if form.head is None:
            return self.head.bytes(form)
        biases = sum(one.bias * one.outputs for one in self.head.matrices)
        return DTYPE_BYTES[form.head] * (self.hidden * self.vocabulary + biases) + (
            DTYPE_BYTES[form.dtype] * self.head.numbers)

    def _parts(self) -> Iterator[Part]:
        yield self.embedding
        yield self.head
