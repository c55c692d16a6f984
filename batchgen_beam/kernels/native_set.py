"""The native kernel set: the compiled library on tensors in host memory, on one instruction path.

Owns the memory forms (weights in panels of 32 outputs, keys with tokens side by side) and the fusing of a whole decoder
into one call, which gives the same bits as its operations one by one.  Prompt tokens and generated ones are all rows of
their own, so lost pages are made again by prefill.  Does not know architectures, sequences or scheduling.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchgen_beam.kernels import native_library as native
from batchgen_beam.kernels.int8_pages import check_kv_dtype, kv_facts, page_shape
from batchgen_beam.kernels.memory import zeroed
from batchgen_beam.kernels.native_experts import add_experts
from batchgen_beam.models.dense import DenseDecoder
from batchgen_beam.models.experts import SILU, Activation, Expert, Routing
from batchgen_beam.models.interface import BatchView, CacheKind, CacheSpec, GroupKey, Scores
from batchgen_beam.models.sampling import Sampled, SamplingLines
from batchgen_beam.settings import PAGE_TOKENS

__all__ = ["NativeKernels", "PackedParts"]

KERNELS_VERSION = 3
"""Part of the numeric print: raised when an operation here gives other bits."""

HEAD_MULTIPLE = 16
"""Values of an attention head go into vectors of so many floats."""


@dataclass(frozen=True, slots=True)
class PackedParts:
    """Weights that stand side by side in the result, each in its own panels.  Owns the memory that `parts` point to."""

    parts: ctypes.Array[native.Weight]
    inputs: int
    outputs: int
    memory: tuple[Tensor, ...]


class NativeKernels:
    """Implements `models.interface.KernelSet` on the CPU.

    Cache layout: keys [pages, G, d / pair, 64, pair] and values [pages, G, 64, d], pair = 2 in bfloat16 and 1 in
    float32; other entries as they are declared.  In int8 each head's page is the same of multiples, and then its 64
    scales.  A path that this machine does not have, and a shape that `fits` refuses, are a `ValueError`.
    """

    name = "native"
    recompute = "prefill"
    wants_zero_pages = False

    def __init__(self, dtype: torch.dtype, path: str, threads: int, *, kv_dtype: torch.dtype | None = None) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"the native kernel set computes in float32 or bfloat16, not {dtype}")
        if threads < 1:
            raise ValueError(f"kernels need at least one thread, not {threads}")
        library, address = native.library(), native.arithmetic(path, half=dtype is torch.bfloat16)
        if library is None or address is None:
            raise ValueError(f"this machine has no instruction path {path!r} for {dtype}")
        self.dtype = dtype
        self.kv_dtype = check_kv_dtype(dtype, kv_dtype)
        self.device = torch.device("cpu")
        self.path = path
        self.threads = threads
        self._library = library
        self._arithmetic = address
        self._seconds = (ctypes.c_double * len(native.PARTS))()

    def facts(self) -> Mapping[str, object]:
        """What decides the bits, those of torch's part in rotation tables included, and the C library's in
        log-probabilities; not the number of threads."""
        return {"kernels": self.name, "device": "cpu", "path": self.path, "version": KERNELS_VERSION,
                "dtype": str(self.dtype).removeprefix("torch."), **kv_facts(self.dtype, self.kv_dtype),
                "torch": torch.__version__, "capability": torch.backends.cpu.get_cpu_capability(),
                "libc": " ".join(platform.libc_ver())}

    def seconds(self) -> Mapping[str, float]:
        """Of all fused passes so far, by part, as the first thread saw them."""
        return dict(zip(native.PARTS, self._seconds, strict=True))

    def allocate(self, spec: CacheSpec, count: int, page_tokens: int) -> Tensor:
        """Zeroed pages in the layout above; memory is taken when a page is first written."""
        assert page_tokens == PAGE_TOKENS or spec.kind is CacheKind.STATE, page_tokens
        return zeroed((count, *page_shape(spec, page_tokens)), spec.dtype, self.device)

    # Products

    def pack(self, weights: Sequence[Tensor], *, biases: Sequence[Tensor] | None = None) -> PackedParts:
        """`[N_i, K]` weights with equal K, stacked along N; K is even in bfloat16."""
        inputs = weights[0].shape[1]
        if self.dtype is torch.bfloat16 and inputs % 2:
            raise ValueError(f"a bfloat16 weight needs an even number of inputs, not {inputs}")
        memory: list[Tensor] = []
        for i, weight_NK in enumerate(weights):
            memory.append(self._panels(weight_NK))
            if biases is not None:
                memory.append(biases[i].float().contiguous())
        return self.adopt(memory, [len(weight) for weight in weights], inputs, biased=biases is not None)

    def adopt(self, memory: Sequence[Tensor], outputs: Sequence[int], inputs: int, *, biased: bool) -> PackedParts:
        """A weight over memory that `pack` made: for each part panels, then its bias if there are biases."""
        parts = (native.Weight * len(outputs))()
        step = 1 + biased
        for i, count in enumerate(outputs):
            bias = memory[step * i + 1].data_ptr() if biased else None
            parts[i] = native.Weight(memory[step * i].data_ptr(), bias, count, inputs)
        return PackedParts(parts, inputs, sum(outputs), tuple(memory))

    def panel_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a packed `[outputs, inputs]` weight."""
        return int(self._library.bg_packed_bytes(self._arithmetic, outputs, inputs))

    def _panels(self, weight_NK: Tensor) -> Tensor:
        source = weight_NK.to(self.dtype).contiguous()
        outputs, inputs = source.shape
        panels = zeroed((self.panel_bytes(outputs, inputs),), torch.uint8, self.device)
        self._library.bg_pack(self._arithmetic, source.data_ptr(), outputs, inputs, panels.data_ptr())
        return panels

    def linear(self, x_TK: Tensor, weight: PackedParts) -> Tensor:
        """`x @ weight.T (+ bias)`, [T, N]; sums in float32, rounded once."""
        x_TK = self._row_major(x_TK)
        assert x_TK.shape[1] == weight.inputs, (x_TK.shape, weight.inputs)
        out_TN = x_TK.new_empty(x_TK.shape[0], weight.outputs)
        self._library.bg_linear(self._arithmetic, self.threads, x_TK.data_ptr(), x_TK.shape[0], weight.parts,
                                len(weight.parts), out_TN.data_ptr())
        return out_TN

    def _row_major(self, x: Tensor) -> Tensor:
        if x.dtype is not self.dtype:
            raise ValueError(f"values are {x.dtype}, the kernel set computes in {self.dtype}")
        return x.contiguous()

    # Lines

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight`, float32 inside, rounded once."""
        x_TD, weight_D = self._row_major(x_TD), self._row_major(weight_D)
        out_TD = torch.empty_like(x_TD)
        self._library.bg_norm(self._arithmetic, self.threads, x_TD.data_ptr(), weight_D.data_ptr(), x_TD.shape[0],
                              x_TD.shape[1], eps, out_TD.data_ptr())
        return out_TD

    def rope(self, x_THd: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
        """Rotary embedding on half-split pairs: (a, b) -> (a cos - b sin, b cos + a sin)."""
        tokens, heads, size = x_THd.shape
        x_THd = self._heads_together(x_THd)
        cos_Td, sin_Td = cos_Td.contiguous(), sin_Td.contiguous()
        out_THd = x_THd.new_empty(tokens, heads, size)
        self._library.bg_rope(self._arithmetic, self.threads, x_THd.data_ptr(), x_THd.stride(0), cos_Td.data_ptr(),
                              sin_Td.data_ptr(), tokens, heads, size, out_THd.data_ptr())
        return out_THd

    def swiglu(self, gate_up_TN: Tensor, activation: Activation = SILU) -> Tensor:
        """`gate / (1 + exp(-gate)) * up`, [T, N / 2], float32 inside, rounded once."""
        if activation != SILU:
            raise ValueError(f"the native kernel set computes no {activation}")
        x_TN = self._row_major(gate_up_TN)
        tokens, inner = x_TN.shape[0], x_TN.shape[1] // 2
        out_TI = x_TN.new_empty(tokens, inner)
        self._library.bg_swiglu(self._arithmetic, self.threads, x_TN.data_ptr(), tokens, inner, out_TI.data_ptr())
        return out_TI

    def experts(self, x_TD: Tensor, routing: Routing, experts: Sequence[Expert], activation: Activation, *,
                shared_TD: Tensor | None = None) -> Tensor:
        """Weighted sum over each token's experts, float32 from the last products on, rounded once."""
        x_TD = self._row_major(x_TD)
        totals_TD = torch.zeros(x_TD.shape, dtype=torch.float32)
        add_experts(routing, experts, activation, lambda some: self._library.bg_run_experts(
            self._arithmetic, self.threads, x_TD.data_ptr(), some, totals_TD.data_ptr()))
        if shared_TD is not None:
            totals_TD += shared_TD.float()
        return totals_TD.to(self.dtype)

    # Attention

    def append(self, cache: Tensor, values_TGd: Tensor, spec: CacheSpec, view: BatchView) -> None:
        """Write each token's entry at its position into the pages of its row; `k` entries are keys."""
        if spec.name != "k" and spec.name != "v":
            raise ValueError(f"the native kernel set keeps entries k and v, not {spec.name!r}")
        if spec.is_scaled:
            self.fits(spec.shape[1])
        values_TGd = self._heads_together(values_TGd)
        write = self._library.bg_append_keys if spec.name == "k" else self._library.bg_append_values
        batch = _Batch(view, spec.group)
        shape = _shape(spec, spec.shape[0])
        write(self._arithmetic, self.threads, values_TGd.data_ptr(), values_TGd.stride(0), batch.struct, shape,
              cache.data_ptr())

    def attention(self, q_THd: Tensor, keys: tuple[CacheSpec, Tensor], values: tuple[CacheSpec, Tensor],
                  view: BatchView, scale: float, *, sinks_H: Tensor | None = None) -> Tensor:
        """Causal (and windowed) attention of each token over its row's pages in page order, [T, H, d]."""
        (spec, key_cache), (value_spec, value_cache) = keys, values
        if value_cache is key_cache:
            raise ValueError("the native kernel set keeps keys and values apart")
        if not scale > 0:
            raise ValueError(f"the native kernel set scales scores by a number above 0, not by {scale}")
        assert spec.is_scaled == value_spec.is_scaled, "keys and values lie in pages of one form"
        tokens, heads, size = q_THd.shape
        self.fits(size)
        if sinks_H is not None:
            sinks_H = sinks_H.float().contiguous()
        q_THd = self._heads_together(q_THd)
        out_THd = q_THd.new_empty(tokens, heads, size)
        batch = _Batch(view, spec.group)
        shape = _shape(spec, heads, scale, None if sinks_H is None else sinks_H.data_ptr())
        self._library.bg_attention(
            self._arithmetic, self.threads, q_THd.data_ptr(), q_THd.stride(0), batch.struct, shape,
            native.Cache(key_cache.data_ptr(), value_cache.data_ptr()), out_THd.data_ptr())
        return out_THd

    def fits(self, head_size: int) -> None:
        """`ValueError` for an attention head that does not fill whole vectors."""
        if head_size % HEAD_MULTIPLE:
            raise ValueError(f"the native kernel set needs heads of a multiple of {HEAD_MULTIPLE} values, not "
                             f"{head_size}")

    def _heads_together(self, x_THd: Tensor) -> Tensor:
        """A view whose tokens may lie apart, but whose heads and values follow each other."""
        if x_THd.dtype is not self.dtype:
            raise ValueError(f"values are {x_THd.dtype}, the kernel set computes in {self.dtype}")
        size = x_THd.shape[2]
        return x_THd if x_THd.stride()[1:] == (size, 1) else x_THd.contiguous()

    # Embedding and head

    def embed(self, table_VD: Tensor, token_ids_T: Tensor) -> Tensor:
        """Rows of the embedding table, [T, D] in the run's dtype."""
        return table_VD.index_select(0, token_ids_T).to(self.dtype)

    def pack_head(self, weight_VD: Tensor) -> PackedParts:
        """The output projection in the run's dtype: its sums are float32 and stay so."""
        return self.pack([weight_VD])

    def head(self, x_WD: Tensor, weight: PackedParts) -> Tensor:
        """Float32 logits [W, V]."""
        result = _Result(np.ones(len(x_WD), np.bool_), weight.outputs, 0, torch.empty)
        return self._scores(x_WD, weight, result).logits_LV

    def scores(self, x_WD: Tensor, weight: PackedParts, view: BatchView) -> Scores:
        """Whole logits only where they are needed."""
        return self._scores(x_WD, weight, _Result(view.whole_W, weight.outputs, view.eligible, torch.empty))

    def _scores(self, x_WD: Tensor, weight: PackedParts, result: _Result) -> Scores:
        x_WD = self._row_major(x_WD)
        assert x_WD.shape[1] == weight.inputs, (x_WD.shape, weight.inputs)
        self._library.bg_head(self._arithmetic, self.threads, x_WD.data_ptr(), x_WD.shape[0], weight.parts,
                              result.struct)
        return result.scores()

    def sample(self, logits_LV: Tensor, lines: SamplingLines, uniform_L: NDArray[np.float64],
               text_vocabulary: int) -> Sampled:
        """The next token of each row, each by one thread."""
        rows, vocabulary = logits_LV.shape
        assert logits_LV.dtype is torch.float32, logits_LV.dtype
        result = Sampled.allocate(rows, int(lines.logprobs.max(initial=0)))
        logits_LV = logits_LV.contiguous()
        inputs = [np.ascontiguousarray(array) for array in (lines.greedy, lines.temperature, lines.top_k, lines.top_p,
                                                            uniform_L, lines.logprobs)]
        outputs = (result.ids_W, result.logprobs_W, result.top_ids_WK, result.top_logprobs_WK, result.bad_W)
        struct = native.Sampling(rows, vocabulary, min(text_vocabulary, vocabulary), result.top_ids_WK.shape[1],
                                 logits_LV.data_ptr(), *(array.ctypes.data for array in (*inputs, *outputs)))
        self._library.bg_sample(self._arithmetic, self.threads, struct)
        return result

    # The whole decoder

    def fuse(self, decoder: DenseDecoder) -> FusedDecoder:
        """One call for a forward pass, with the bits of the operations one by one."""
        return FusedDecoder(self, decoder)


class FusedDecoder:
    """A dense decoder as one call into the library.

    Keeps the memory of the logits from pass to pass: fresh memory costs more than sampling from it.
    """

    def __init__(self, kernels: NativeKernels, decoder: DenseDecoder) -> None:
        kernels.fits(decoder.head_size)
        self._kernels = kernels
        self._decoder = decoder
        self._caches: tuple[object, ctypes.Array[native.Cache]] | None = None
        self._logits_LV = torch.empty(0, decoder.head.outputs)
        self._layers = (native.DecoderLayer * len(decoder.layers))()
        for struct, layer in zip(self._layers, decoder.layers, strict=True):
            struct.attention_norm = layer.attention_norm_D.data_ptr()
            struct.qkv[:] = layer.qkv.parts[:]
            struct.out = layer.out.parts[0]
            struct.feed_forward_norm = layer.feed_forward_norm_D.data_ptr()
            struct.gate, struct.up = layer.gate_up.parts[:]
            struct.down = layer.down.parts[0]
        attention = native.Attention(decoder.heads, decoder.kv_heads, decoder.head_size, decoder.group.window or 0,
                                     kernels.kv_dtype is torch.int8, decoder.head_size**-0.5)
        self._struct = native.Decoder(
            layers=self._layers, layer_count=len(self._layers), hidden=decoder.table_VD.shape[1],
            inner=decoder.layers[0].down.inputs,
            attention=attention, epsilon=decoder.epsilon,
            table=decoder.table_VD.data_ptr(), norm=decoder.norm_D.data_ptr(), head=decoder.head.parts[0],
            cosines=decoder.cos_Cf.data_ptr(), sines=decoder.sin_Cf.data_ptr())

    def __call__(self, view: BatchView) -> Scores:
        """Scores of the wanted tokens."""
        kernels = self._kernels
        batch = _Batch(view, self._decoder.group)
        caches = self._addresses(view)
        result = _Result(view.whole_W, self._decoder.head.outputs, view.eligible, self._logits)
        kernels._library.bg_forward(kernels._arithmetic, kernels.threads, self._struct, batch.struct, caches,
                                    result.struct, kernels._seconds)
        return result.scores()

    def _logits(self, lines: int, vocabulary: int) -> Tensor:
        """So many lines of the memory that is kept."""
        if lines > len(self._logits_LV):
            self._logits_LV = zeroed((lines, vocabulary), torch.float32, self._kernels.device)
        return self._logits_LV[:lines]

    def _addresses(self, view: BatchView) -> ctypes.Array[native.Cache]:
        """Of the caches, which are the same in every pass of an engine."""
        if self._caches is None or self._caches[0] is not view.caches:
            found = [native.Cache(cache["k"].data_ptr(), cache["v"].data_ptr()) for cache in view.caches]
            self._caches = view.caches, (native.Cache * len(found))(*found)
        return self._caches[1]


class _Batch:
    """A view's arrays behind the library's struct, kept as long as this object is."""

    def __init__(self, view: BatchView, group: GroupKey) -> None:
        table_RP = view.page_tables[group]
        self._kept = [tensor.contiguous() for tensor in (view.token_ids_T, view.positions_T, view.offsets_R1,
                                                         view.wanted_W, table_RP)]
        self.struct = native.Batch(len(view.token_ids_T), len(table_RP), len(view.wanted_W), table_RP.shape[1],
                                   *(tensor.data_ptr() for tensor in self._kept))


class _Result:
    """Where the library puts what wanted tokens come to; `empty(lines, vocabulary)` gives memory for logits."""

    def __init__(self, whole_W: NDArray[np.bool_], vocabulary: int, eligible: int,
                 empty: Callable[[int, int], Tensor]) -> None:
        self._line_W = np.where(whole_W, np.cumsum(whole_W) - 1, -1).astype(np.int64)
        self._logits_LV = empty(int(whole_W.sum()), vocabulary)
        self._ids_W = np.zeros(len(whole_W), np.int64)
        self._logprobs_W = np.zeros(len(whole_W), np.float32)
        self.struct = native.Result(eligible, self._line_W.ctypes.data, self._logits_LV.data_ptr(),
                                    self._ids_W.ctypes.data, self._logprobs_W.ctypes.data)

    def scores(self) -> Scores:
        """The filled arrays."""
        return Scores(logits_LV=self._logits_LV, line_W=self._line_W, ids_W=self._ids_W, logprobs_W=self._logprobs_W)


def _shape(spec: CacheSpec, heads: int, scale: float = 1.0, sinks: int | None = None) -> native.Attention:
    kv_heads, size = spec.shape
    return native.Attention(heads, kv_heads, size, spec.window or 0, spec.is_scaled, scale, sinks)
