"""Whether this machine keeps the law of batch invariance, asked at load time with the model's own shapes.

Libraries choose kernels by shape, thread count and processor, so what held on one machine proves nothing on the next.
Every operation runs on the same seeded rows alone, in batches of many sizes and at other places of the batch; the bits
have to agree.  Knows shapes only: no architecture, no weights, no sequences.

Shape suffixes: T tokens, W rows, Q queries, D and K inputs, V vocabulary, G KV heads, H query heads, d head size,
P pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from batchgen_beam.models.experts import SILU, Activation, Expert, Routing
from batchgen_beam.models.interface import BatchView, CacheKind, CacheSpec, GroupKey, KernelSet
from batchgen_beam.models.sampling import SamplingLines
from batchgen_beam.records import SamplingParams

__all__ = ["AttentionShape", "ExpertShape", "ModelShapes", "SelfTest", "check_invariance"]

ROWS = 256
BATCHES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 64, 65, 100, 128, 200, 255)
FEW_ROWS = 64
FEW_EXPERTS = 8
FEW_BATCHES = (1, 2, 15, 33)
LONGEST = 4096
WEIGHT_NUMBERS = 1 << 22
"""Of a weight's part that is tested where memory is short: 16 MiB of float32."""

FEW_OUTPUTS = 64
FEW_QUERIES = 512
"""Queries that repeat along a context."""

SEED = 20250


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """H query heads over G key/value heads of `size`; `window` in tokens, None sees everything.

    With a `value_size` keys and values are one entry, of which that many are the value (latent attention).
    """

    heads: int
    kv_heads: int
    size: int
    window: int | None = None
    sinks: bool = False
    value_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """`count` experts, `chosen` of them for each token, from `size` to `inner` and back."""

    count: int
    chosen: int
    size: int
    inner: int
    activation: Activation = SILU


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapes:
    """Distinct shapes of a model: `linear` (N, K) of each packed product, `head` (V, D), norm and activation widths."""

    linear: tuple[tuple[int, int], ...]
    head: tuple[int, int]
    norms: tuple[int, ...]
    activations: tuple[int, ...]
    attention: tuple[AttentionShape, ...]
    experts: ExpertShape | None = None

    def cut(self) -> ModelShapes:
        """With fewer outputs where a weight has more than `WEIGHT_NUMBERS`, each still over its whole input: a test of
        these takes the same little memory for every model.  Of experts that are cut, one's products stand apart too."""
        linear, experts = list(self.linear), self.experts
        if experts is not None:
            inner = _fewer(experts.inner, 3 * FEW_EXPERTS * experts.size)
            if inner < experts.inner:
                linear += [(2 * experts.inner, experts.size), (experts.size, experts.inner)]
                experts = replace(experts, inner=inner)
        return replace(self, linear=tuple(dict.fromkeys((_fewer(n, k), k) for n, k in linear)),
                       head=(_fewer(*self.head), self.head[1]),
                       activations=tuple(dict.fromkeys(_fewer(width, 2 * ROWS) for width in self.activations)),
                       experts=experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """What was found; `failures` name an operation, its shape and the batch that changed a row's bits."""

    deterministic: bool
    failures: tuple[str, ...]
    seconds: float


def check_invariance(kernels: KernelSet, shapes: ModelShapes, *, page_tokens: int = 64, longest: int = LONGEST,
                     clock: Callable[[], float] = time.monotonic) -> SelfTest:
    """Run every operation of `kernels` alone and in company; `longest` bounds the attention contexts (tokens)."""
    begin = clock()
    random = torch.Generator().manual_seed(SEED)
    checks = (_products(kernels, shapes, random), _lines(kernels, shapes, random), _sampling(kernels, shapes, random),
              () if shapes.experts is None else _experts(kernels, shapes.experts, random),
              *(_attention(kernels, shape, random, page_tokens, longest) for shape in shapes.attention))
    failures = tuple(failure for check in checks for failure in check)
    return SelfTest(deterministic=not failures, failures=failures, seconds=clock() - begin)


def _random(kernels: KernelSet, random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=random).to(device=kernels.device, dtype=kernels.dtype)


def _sweep(name: str, operation: Callable[[Tensor], Tensor], x: Tensor, batches: tuple[int, ...]) -> Iterator[str]:
    """Failures of a per-row operation: its first and its last rows, in batches of each size, against all of `x`."""
    whole = operation(x)
    for rows in batches:
        first, last = operation(x[:rows]), operation(x[-rows:])
        if not (torch.equal(first, whole[:rows]) and torch.equal(last, whole[-rows:])):
            yield f"{name}: batch of {rows}"


def _fewer(outputs: int, inputs: int) -> int:
    """So many outputs of a weight that it has `WEIGHT_NUMBERS` at most, or `FEW_OUTPUTS`."""
    if outputs * inputs <= WEIGHT_NUMBERS:
        return outputs
    return min(outputs, max(1, WEIGHT_NUMBERS // inputs // FEW_OUTPUTS) * FEW_OUTPUTS)


def _products(kernels: KernelSet, shapes: ModelShapes, random: torch.Generator) -> Iterator[str]:
    for outputs, inputs in shapes.linear:
        weight = kernels.pack([_random(kernels, random, outputs, inputs)])
        x_TK = _random(kernels, random, ROWS, inputs)
        yield from _sweep(f"linear {outputs}x{inputs}", partial(kernels.linear, weight=weight), x_TK, BATCHES)
    vocabulary, inputs = shapes.head
    block_VD = _random(kernels, random, min(vocabulary, 1024), inputs)
    head = kernels.pack_head(block_VD.repeat(-(-vocabulary // len(block_VD)), 1)[:vocabulary])
    x_WD = _random(kernels, random, FEW_ROWS, inputs)
    yield from _sweep(f"head {vocabulary}x{inputs}", partial(kernels.head, weight=head), x_WD, FEW_BATCHES)


def _lines(kernels: KernelSet, shapes: ModelShapes, random: torch.Generator) -> Iterator[str]:
    """Norms, activations and rotations."""
    for width in shapes.norms:
        weight_D = _random(kernels, random, width)
        x_TD = _random(kernels, random, ROWS, width)
        norm = partial(kernels.rms_norm, weight_D=weight_D, eps=1e-5)
        yield from _sweep(f"rms_norm {width}", norm, x_TD, BATCHES)
    for width in shapes.activations:
        x_TN = _random(kernels, random, ROWS, 2 * width)
        yield from _sweep(f"swiglu {width}", kernels.swiglu, x_TN, BATCHES)
    for shape in shapes.attention:
        x_THd = _random(kernels, random, ROWS, shape.heads, shape.size)
        angles_d = torch.arange(shape.size // 2, device=kernels.device, dtype=torch.float32)

        def rotate(x: Tensor, angles: Tensor = angles_d) -> Tensor:
            return kernels.rope(x, angles.cos().expand(len(x), -1), angles.sin().expand(len(x), -1))

        yield from _sweep(f"rope {shape.heads}x{shape.size}", rotate, x_THd, BATCHES)


def _sampling(kernels: KernelSet, shapes: ModelShapes, random: torch.Generator) -> Iterator[str]:
    """The sampler's row operations: one row of each kind of parameters, alone and in company."""
    kinds = (SamplingParams(temperature=0.0, logprobs=5), SamplingParams(), SamplingParams(top_k=20),
             SamplingParams(top_p=0.9), SamplingParams(top_k=20, top_p=0.5, logprobs=2))
    lines = SamplingLines.allocate(len(kinds))
    for slot, params in enumerate(kinds):
        lines.put(slot, params, SEED + slot)
    uniform_W = np.linspace(0.1, 0.9, len(kinds))
    logits_WV = 4.0 * torch.randn(len(kinds), shapes.head[0], generator=random).to(kernels.device)
    every = np.arange(len(kinds))
    mixed = kernels.sample(logits_WV, lines, uniform_W, shapes.head[0])
    for row, params in enumerate(kinds):
        one = every[row : row + 1]
        alone = kernels.sample(logits_WV[row : row + 1], lines.take(one), uniform_W[one], shapes.head[0])
        same = (alone.ids_W[0] == mixed.ids_W[row] and alone.logprobs_W[0] == mixed.logprobs_W[row]
                and np.array_equal(alone.top_logprobs_WK[0, : params.logprobs],
                                   mixed.top_logprobs_WK[row, : params.logprobs]))
        if not same:
            yield f"sampling {shapes.head[0]}: {params}"


def _experts(kernels: KernelSet, shape: ExpertShape, random: torch.Generator) -> Iterator[str]:
    """The router's product, and a few experts with tokens that choose among them at random."""
    router = kernels.pack_head(_random(kernels, random, shape.count, shape.size))
    x_TD = _random(kernels, random, ROWS, shape.size)
    yield from _sweep(f"router {shape.count}x{shape.size}", partial(kernels.head, weight=router), x_TD, BATCHES)
    count, scale = min(shape.count, FEW_EXPERTS), shape.size**-0.5
    chosen = min(shape.chosen, count)
    experts = [Expert(gate_up=kernels.pack([scale * _random(kernels, random, shape.inner, shape.size)
                                            for _ in range(2)]),
                      down=kernels.pack([_random(kernels, random, shape.size, shape.inner)])) for _ in range(count)]
    ids_Tk = torch.rand(ROWS, count, generator=random).argsort(1)[:, :chosen].to(kernels.device)
    weights_Tk = torch.rand(ROWS, chosen, generator=random).to(kernels.device)

    def run(rows: slice) -> Tensor:
        return kernels.experts(x_TD[rows], Routing(ids_Tk=ids_Tk[rows], weights_Tk=weights_Tk[rows]), experts,
                               shape.activation)

    whole = run(slice(None))
    for rows in BATCHES:
        if not all(torch.equal(run(part), whole[part]) for part in (slice(rows), slice(-rows, None))):
            yield f"experts {shape.count}x{shape.inner}x{shape.size}: batch of {rows}"


def _attention(kernels: KernelSet, shape: AttentionShape, random: torch.Generator, page_tokens: int,
               longest: int) -> Iterator[str]:
    """Tokens near page borders alone, in chunks that begin elsewhere, and among rows of other lengths."""
    kind = CacheKind.PAGED if shape.window is None else CacheKind.WINDOWED
    keys, values = (CacheSpec(name=name, kind=kind, shape=(shape.kv_heads, shape.size), dtype=kernels.kv_dtype,
                              window=shape.window) for name in ("k", "v"))
    sinks_H = torch.randn(shape.heads, generator=random).to(kernels.device) if shape.sinks else None
    pages = -(-longest // page_tokens)
    everything = _view([range(longest)], keys.group, pages, kernels.device)
    caches = {}
    for spec in (keys, values):
        caches[spec] = spec, kernels.allocate(spec, pages + 1, page_tokens)
        kernels.append(caches[spec][1], _random(kernels, random, longest, *spec.shape), spec, everything)
    stored = caches[values]
    if shape.value_size is not None:
        stored = replace(keys, shape=(shape.kv_heads, shape.value_size)), caches[keys][1]
    query_QHd = _random(kernels, random, FEW_QUERIES, shape.heads, shape.size)

    def run(rows: list[range]) -> Tensor:
        view = _view(rows, keys.group, pages, kernels.device)
        query_THd = query_QHd[view.positions_T % FEW_QUERIES]
        return kernels.attention(query_THd, caches[keys], stored, view, shape.size**-0.5, sinks_H=sinks_H)

    borders = (0, 1, page_tokens - 1, page_tokens, 2 * page_tokens + 1, longest // 4 - 1, longest // 2, longest - 1)
    places = sorted({place for place in borders if 0 <= place < longest})
    name = f"attention {shape.heads}/{shape.kv_heads}x{shape.size} window {shape.window}"
    alone = [run([range(place, place + 1)])[0] for place in places]
    mixed = run([range(place, place + 1) for place in reversed(places)]).flip(0)
    chunks = [range(max(0, place - 1 - index), min(longest, place + 20)) for index, place in enumerate(places)]
    chunked = torch.split(run(chunks), [len(chunk) for chunk in chunks])
    short = [place for place in places if place < 3 * page_tokens]
    crowd = run([range(place, place + 1) for place in short] * (ROWS // len(short)))
    if not torch.equal(crowd, torch.stack(alone[: len(short)]).repeat(ROWS // len(short), 1, 1)):
        yield f"{name}: among {ROWS} short rows"
    for index, place in enumerate(places):
        if not torch.equal(mixed[index], alone[index]):
            yield f"{name}: position {place} in a mixed batch"
        if not torch.equal(chunked[index][place - chunks[index].start], alone[index]):
            yield f"{name}: position {place} in a chunk"


def _view(rows: list[range], group: GroupKey, pages: int, device: torch.device) -> BatchView:
    """A packed batch whose rows all read the same pages, 1, 2, 3, ..."""
    lengths_R = torch.tensor([len(row) for row in rows], device=device)
    positions_T = torch.cat([torch.arange(row.start, row.stop, device=device) for row in rows])
    offsets_R1 = torch.cat((lengths_R.new_zeros(1), lengths_R.cumsum(0)))
    table_RP = torch.arange(1, pages + 1, device=device).expand(len(rows), pages)
    return BatchView(token_ids_T=torch.zeros_like(positions_T), positions_T=positions_T,
                     row_T=torch.repeat_interleave(lengths_R), offsets_R1=offsets_R1, wanted_W=offsets_R1[1:] - 1,
                     whole_W=np.ones(len(rows), np.bool_), eligible=0,
                     page_tables={group: table_RP}, state_slots_R=lengths_R.new_zeros(0), caches=())
