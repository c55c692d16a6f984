"""Rough times of a model's layers, from how long a byte of weights takes for so many tokens.

Owns the arithmetic: products by the bytes that they read, attention's past by its keys and values (answers) or by its
operations (prompts).  Norms, routers and the exchange are left out, so times are too short by those.  Pure; does not
know how the seconds were measured.
"""

from __future__ import annotations

from collections.abc import Mapping

from batchgen_beam.engine.measured_costs import Curve, LayerTimes, MachineTimes, Surface, kinds_of
from batchgen_beam.engine.model_load import LayerLoad, ModelLoad

__all__ = ["times_of_products"]

_TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
_SPAN = 1024
"""Tokens of the past of the longer of two contexts, where no window ends it."""


def times_of_products(model: ModelLoad, seconds: Mapping[int, float], disk: float) -> MachineTimes:
    """`seconds` that a product takes for each byte of its weights, by tokens; `disk` bytes/s."""
    byte = Curve.of(seconds)
    head = Curve.of({tokens: model.head_bytes * byte.at(tokens) for tokens in _TOKENS})
    return MachineTimes(kinds=tuple(_kind(layer, byte) for layer in kinds_of(model.layers)), head=head, combine=0.0,
                        disk=disk)


def _kind(layer: LayerLoad, byte: Curve) -> LayerTimes:
    own = {tokens: layer.attention_bytes * byte.at(tokens) for tokens in _TOKENS}
    many = byte.tokens[-1]
    operation = byte.seconds[-1] * layer.attention_bytes / (many * layer.attention_flops)
    answer, prompt = layer.kv_token_bytes * byte.seconds[0], layer.context_flops * operation
    span = layer.window or _SPAN
    return LayerTimes(decode=_surface(own, span, answer), prompt=_surface(own, span, prompt), feed_forward=Curve.of(
        {tokens: _feed_forward(layer, byte, tokens) for tokens in _TOKENS}))


def _surface(own: Mapping[int, float], span: int, past: float) -> Surface:
    """`past`: seconds for a token and a token of its past, of which there are none or `span`."""
    longer = {tokens: seconds + tokens * span * past for tokens, seconds in own.items()}
    return Surface((0.0, float(span)), (Curve.of(own), Curve.of(longer)))


def _feed_forward(layer: LayerLoad, byte: Curve, tokens: int) -> float:
    """What every token passes, and the experts that are chosen, each by its share of the tokens."""
    seconds = layer.fixed_bytes * byte.at(tokens)
    if layer.experts:
        touched = layer.touched(tokens)
        seconds += touched * layer.expert_bytes * byte.at(tokens * layer.experts_per_token / touched)
    return seconds
