"""Small GGUF files for tests, written by the `gguf` package the way llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from numpy.typing import NDArray

VOCABULARY, WIDTH, INNER, HEADS, KV_HEADS, HEAD_SIZE, LAYERS = 40, 64, 96, 4, 2, 16, 2

Tensors = dict[str, NDArray[np.float32]]


def metadata(**changes: Any) -> dict[str, Any]:
    """Keys of a small Llama; `a__b` in a change stands for the key `a.b`, None removes it."""
    keys: dict[str, Any] = {
        "llama.block_count": LAYERS, "llama.context_length": 128, "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": INNER, "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS, "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.dimension_count": HEAD_SIZE,
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(VOCABULARY)], "tokenizer.ggml.token_type": [1] * VOCABULARY,
        "tokenizer.ggml.merges": ["t 0", "t 1"], "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    keys |= {name.replace("__", "."): value for name, value in changes.items()}
    return {name: value for name, value in keys.items() if value is not None}


def hub_tensors(*, tied: bool = True, biases: bool = False) -> Tensors:
    """Random weights under the hub's names, rows in the hub's order."""
    random = np.random.default_rng(5)
    sizes = {"q_proj": (WIDTH, WIDTH), "k_proj": (KV_HEADS * HEAD_SIZE, WIDTH), "v_proj": (KV_HEADS * HEAD_SIZE, WIDTH),
             "o_proj": (WIDTH, WIDTH)}
    inner = {"gate_proj": (INNER, WIDTH), "up_proj": (INNER, WIDTH), "down_proj": (WIDTH, INNER)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, WIDTH),
                                          "model.norm.weight": (WIDTH,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, WIDTH)
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.{name}.weight": (WIDTH,) for name in ("input_layernorm", "post_attention_layernorm")}
        for part, projections in (("self_attn", sizes), ("mlp", inner)):
            for name, shape in projections.items():
                shapes[f"{at}.{part}.{name}.weight"] = shape
                if biases:
                    shapes[f"{at}.{part}.{name}.bias"] = shape[:1]
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
          "model.layers.": "blk.", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
          "self_attn.o_proj": "attn_output", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
          "self_attn.v_proj": "attn_v", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
          "mlp.down_proj": "ffn_down"}


def file_tensors(hub: Mapping[str, NDArray[np.float32]]) -> Tensors:
    """The same under the file's names, rows of Q and K in the converter's order."""
    found = {}
    for name, tensor in hub.items():
        for heads, mark in ((HEADS, "q_proj"), (KV_HEADS, "k_proj")):
            if mark in name:
                halves = tensor.reshape(heads, 2, HEAD_SIZE // 2, *tensor.shape[1:])
                tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        for hub_part, part in _NAMES.items():
            name = name.replace(hub_part, part)
        found[name] = tensor
    return found


def write_gguf(path: Path, tensors: Mapping[str, NDArray[np.float32]], keys: Mapping[str, Any] | None = None, *,
               architecture: str = "llama", kind: GGMLQuantizationType = GGMLQuantizationType.F32) -> Path:
    """A file with matrices of `kind` and vectors of float32."""
    writer = GGUFWriter(path, architecture)
    for name, value in (metadata() if keys is None else keys).items():
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case str():
                writer.add_string(name, value)
            case _:
                writer.add_array(name, value)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and kind is not GGMLQuantizationType.F32:
            writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
