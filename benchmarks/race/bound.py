"""The least time that a workload can take on a machine of measured rates, whatever the engine.

The steps are those of an ideal engine: rows are admitted in order as soon as one of `active_rows` places is free, a
prompt is computed in the step that admits its row, a shared prefix once, and every row has its exact length.

A step computes `2 * (body * tokens + head * scored)` FLOPs in products, where `body` and `head` are the weights of the
layers and of the output projection, and reads all weights once.  Attention computes `4 * heads * head_size * layers`
FLOPs for each pair of a token and one before it (causal), and reads keys and values of each row once in a step, those
of a shared prefix once for all rows.

    sum      = FLOPs / GEMM rate + weight bytes / read rate + attention
    overlap  = sum over steps of max(FLOPs / GEMM rate, bytes / read rate), attention within both

`sum` is the bound that engines are held against: no library here computes while it waits for memory.  `overlap` is the
stricter one, of a machine that does both at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.race.workloads import Row, shared_prefix

__all__ = ["Shapes", "Step", "bound", "shapes_of", "steps"]

WEIGHT_BYTES = 2
"""bfloat16, keys and values too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shapes:
    """A decoder's sizes; products are (inputs, outputs, how many of them in one pass)."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int

    @property
    def products(self) -> tuple[tuple[int, int, int], ...]:
        """Of the layers, as engines stack them: queries, keys and values; output; gate and up; down."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        return ((self.hidden, queries + 2 * keys, self.layers), (queries, self.hidden, self.layers),
                (self.hidden, 2 * self.inner, self.layers), (self.inner, self.hidden, self.layers))

    @property
    def body(self) -> int:
        """Weights of all layers."""
        return sum(inputs * outputs * count for inputs, outputs, count in self.products)

    @property
    def head(self) -> int:
        """Weights of the output projection."""
        return self.hidden * self.vocabulary


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one pass has to do: tokens through the layers, tokens scored, and attention's pairs and KV tokens read."""

    tokens: int
    scored: int
    pairs: int
    kv_tokens: int


def shapes_of(config: Mapping[str, Any]) -> Shapes:
    """From the values of a config.json."""
    heads = config["num_attention_heads"]
    return Shapes(hidden=config["hidden_size"], inner=config["intermediate_size"], layers=config["num_hidden_layers"],
                  heads=heads, kv_heads=config.get("num_key_value_heads", heads),
                  head_size=config.get("head_dim") or config["hidden_size"] // heads, vocabulary=config["vocab_size"])


def steps(rows: Sequence[Row], active_rows: int) -> Iterator[Step]:
    """The ideal engine's passes; a row of n answer tokens takes part in n of them."""
    prefix = shared_prefix(rows)
    waiting, running = deque(rows), list[list[int]]()
    prefix_is_computed = prefix == 0
    while waiting or running:
        tokens, pairs, kv_tokens = len(running), 0, 0
        for row in running:
            row[0] += 1
            pairs, kv_tokens = pairs + row[0], kv_tokens + row[0] - prefix
        while waiting and len(running) < active_rows:
            row_in = waiting.popleft()
            size = len(row_in.prompt_ids)
            done = prefix if prefix_is_computed else 0
            prefix_is_computed = True
            tokens += size - done
            pairs += (size * (size + 1) - done * (done + 1)) // 2
            kv_tokens += size - prefix
            running.append([size, row_in.max_tokens])
        scored = len(running)
        for row in running:
            row[1] -= 1
        running = [row for row in running if row[1]]
        yield Step(tokens=tokens, scored=scored, pairs=pairs, kv_tokens=kv_tokens + prefix)


def bound(rows: Sequence[Row], active_rows: int, shapes: Shapes, flops: float, read: float) -> dict[str, float]:
    """Seconds of the parts and of both bounds, from FLOP/s of the best product and bytes/s of the fastest read."""
    weights = (shapes.body + shapes.head) * WEIGHT_BYTES
    pair_flops = 4 * shapes.heads * shapes.head_size * shapes.layers
    token_bytes = 2 * shapes.kv_heads * shapes.head_size * shapes.layers * WEIGHT_BYTES
    compute = stream = attention = overlap = 0.0
    count = 0
    for step in steps(rows, active_rows):
        count += 1
        products = 2 * (shapes.body * step.tokens + shapes.head * step.scored) / flops
        pairs, cache = pair_flops * step.pairs / flops, token_bytes * step.kv_tokens / read
        compute, stream, attention = compute + products, stream + weights / read, attention + pairs + cache
        overlap += max(products + pairs, weights / read + cache)
    return {"steps": count, "compute_seconds": compute, "read_seconds": stream, "attention_seconds": attention,
            "sum_seconds": compute + stream + attention, "overlap_seconds": overlap}
