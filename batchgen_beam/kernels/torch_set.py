"""The torch kernel set: every operation in plain torch, on any device; the reference of all other sets.

Owns the law that a token's bits depend on its own row alone.  Products run in fixed row tiles (`gemm`), attention page
by page (`paged_attention`), norms and activations line by line.  `exp` is the only transcendental in use: torch's
`sigmoid` and `silu` take another code path for the last elements of an array, so their bits depend on its length.
Does not know architectures, sequences or scheduling.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from batchgen_beam.kernels import torch_sampling
from batchgen_beam.kernels.expert_batches import run_experts
from batchgen_beam.kernels.gemm import SPAN, PackedLinear, has_prepacking, in_tiles, is_widened, pack_linear
from batchgen_beam.kernels.int8_pages import check_kv_dtype, kv_facts, page_shape
from batchgen_beam.kernels.memory import zeroed
from batchgen_beam.kernels.paged_attention import QUERY_LINES, Workspace, append_entries, paged_attention
from batchgen_beam.models.dense import DenseDecoder
from batchgen_beam.models.experts import SILU, Activation, Expert, Routing
from batchgen_beam.models.interface import BatchView, CacheSpec, Scores
from batchgen_beam.models.sampling import Sampled, SamplingLines

__all__ = ["TILE_ROWS", "TorchKernels"]

TILE_ROWS = 32

KERNELS_VERSION = 1
"""Part of the numeric print: raised when an operation here gives other bits."""

_PATHS = ("amx_bf16", "amx_fp16", "avx512_bf16", "avx512_fp16", "avx512_f", "avx_ne_convert", "avx2")
"""Instruction sets by which oneDNN and MKL choose their kernels."""

_PATH_OVERRIDES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR",
                   "ATEN_CPU_CAPABILITY")


class TorchKernels:
    """Implements `models.interface.KernelSet`.  Cache layout: [pages, G, page_tokens, d]; in int8 that of
    `int8_pages.split_pages`.

    `tile_rows` None runs products over the whole batch at once and so breaks the law; only tests that show the
    self-test at work ask for it.
    """

    name = "torch"
    wants_zero_pages = True

    def __init__(self, dtype: torch.dtype, *, device: torch.device | str = "cpu",
                 tile_rows: int | None = TILE_ROWS, kv_dtype: torch.dtype | None = None) -> None:
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"the torch kernel set computes in float32 or bfloat16, not {dtype}")
        self.dtype = dtype
        self.kv_dtype = check_kv_dtype(dtype, kv_dtype)
        self.device = torch.device(device)
        self.tile_rows = tile_rows
        self.recompute = "prefill" if self.device.type == "cpu" else "replay"
        self._workspace = Workspace()

    @property
    def threads(self) -> int:
        """Torch's."""
        return torch.get_num_threads()

    def facts(self) -> Mapping[str, object]:
        """What decides the bits."""
        return {
            "kernels": self.name,
            "device": self.device.type,
            "capability": self._capability(),
            "version": KERNELS_VERSION,
            "torch": torch.__version__,
            "libc": " ".join(platform.libc_ver()),
            "threads": self.threads,
            "dtype": str(self.dtype).removeprefix("torch."),
            **kv_facts(self.dtype, self.kv_dtype),
            "gemm": self._gemm(),
            "tile_rows": self.tile_rows,
            "span": SPAN,
            "query_lines": QUERY_LINES,
        }

    def _gemm(self) -> str:
        if not self.tile_rows or not has_prepacking(self.device):
            return "linear"
        return "onednn-widened" if is_widened(self.device, self.dtype) else "onednn-prepacked"

    def _capability(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        found = torch.cpu.get_capabilities()
        paths = [name for name in _PATHS if found.get(name)]
        chosen = [f"{name}={os.environ[name]}" for name in _PATH_OVERRIDES if name in os.environ]
        return " ".join([torch.backends.cpu.get_cpu_capability(), str(found.get("cpu_name", "")), *paths, *chosen])

    def seconds(self) -> Mapping[str, float]:
        """Parts are not timed."""
        return {}

    def allocate(self, spec: CacheSpec, count: int, page_tokens: int) -> Tensor:
        """Zeroed pages in the layout above, or state slots [count, *shape]."""
        return zeroed((count, *page_shape(spec, page_tokens)), spec.dtype, self.device)

    def pack(self, weights: Sequence[Tensor], *, biases: Sequence[Tensor] | None = None) -> PackedLinear:
        """`[N_i, K]` weights stacked along N, in the run's dtype."""
        span = SPAN if self.dtype is torch.float32 else None
        return pack_linear(weights, biases, dtype=self.dtype, device=self.device, tile_rows=self.tile_rows, span=span)

    def linear(self, x_TK: Tensor, weight: PackedLinear) -> Tensor:
        """`x @ weight.T (+ bias)`, [T, N]; sums in float32, rounded once."""
        return in_tiles(x_TK, weight, self.tile_rows)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, float32 inside, rounded once."""
        x = x_TD.float()
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return (x * inverse * weight_D.float()).to(x_TD.dtype)

    def rope(self, x_THd: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
        """Rotary embedding on half-split pairs: (a, b) -> (a cos - b sin, b cos + a sin)."""
        a, b = x_THd.float().chunk(2, -1)
        cos, sin = cos_Td[:, None, :], sin_Td[:, None, :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x_THd.dtype)

    def swiglu(self, gate_up_TN: Tensor, activation: Activation = SILU) -> Tensor:
        """`gate / (1 + exp(-alpha gate)) * (up + shift)`, [T, N / 2], float32 inside, rounded once."""
        gate, up = (half.float() for half in gate_up_TN.chunk(2, -1))
        if activation.limit is not None:
            gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        if activation.shift:
            up = up + activation.shift
        return (gate / (torch.exp(gate * -activation.alpha) + 1.0) * up).to(gate_up_TN.dtype)

    def experts(self, x_TD: Tensor, routing: Routing, experts: Sequence[Expert], activation: Activation, *,
                shared_TD: Tensor | None = None) -> Tensor:
        """Weighted sum over each token's experts, float32 inside, rounded once."""
        def run(x_ND: Tensor, expert: Expert) -> Tensor:
            return self.linear(self.swiglu(self.linear(x_ND, expert.gate_up), activation), expert.down)

        return run_experts(x_TD, routing, experts, run, shared_TD)

    def append(self, cache: Tensor, values_TGd: Tensor, spec: CacheSpec, view: BatchView) -> None:
        """Write each token's entry at its position into the pages of its row."""
        append_entries(cache, values_TGd, spec, view)

    def attention(self, q_THd: Tensor, keys: tuple[CacheSpec, Tensor], values: tuple[CacheSpec, Tensor],
                  view: BatchView, scale: float, *, sinks_H: Tensor | None = None) -> Tensor:
        """Causal (and windowed) attention of each token over its row's pages, [T, H, v]."""
        return paged_attention(q_THd, keys, values, view, scale, self._workspace, sinks_H)

    def embed(self, table_VD: Tensor, token_ids_T: Tensor) -> Tensor:
        """Rows of the embedding table, [T, D] in the run's dtype."""
        return table_VD.index_select(0, token_ids_T).to(self.dtype)

    def pack_head(self, weight_VD: Tensor) -> PackedLinear:
        """The output projection kept in float32: on the CPU no product takes bfloat16 and gives float32."""
        return pack_linear([weight_VD], None, dtype=torch.float32, device=self.device, tile_rows=self.tile_rows)

    def head(self, x_WD: Tensor, weight: PackedLinear) -> Tensor:
        """Float32 logits [W, V]."""
        return in_tiles(x_WD.float(), weight, self.tile_rows)

    def scores(self, x_WD: Tensor, weight: PackedLinear, view: BatchView) -> Scores:
        """Whole logits of all wanted tokens."""
        return Scores.whole(self.head(x_WD, weight))

    def sample(self, logits_LV: Tensor, lines: SamplingLines, uniform_L: NDArray[np.float64],
               text_vocabulary: int) -> Sampled:
        """The next token of each row."""
        return torch_sampling.sample(logits_LV, lines, uniform_L, text_vocabulary)

    def fuse(self, decoder: DenseDecoder) -> None:
        """There is no faster way than operation by operation."""
        del decoder
