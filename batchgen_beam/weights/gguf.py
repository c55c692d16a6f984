"""GGUF files of architecture `llama`, made into a folder that loads like any other checkpoint.

Owns the table of tensor names, the way back from the converter's row order of Q and K, and the hub's spelling of the
configuration.  Every quantised tensor is dequantised once, to float32.  Does not know tokenizers, kernels or layers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from numpy.typing import NDArray

from batchgen_beam.config.families.llama import LlamaConfig
from batchgen_beam.config.reading import JsonObject
from batchgen_beam.errors import CheckpointError
from batchgen_beam.weights.gguf_metadata import GgufMetadata, open_gguf, parse_metadata
from batchgen_beam.weights.gguf_rope import rope_scaling_json
from batchgen_beam.weights.name_tables import Parameter, expected_parameters, match_names
from batchgen_beam.weights.safetensors_writer import StoredTensor, write_float32

__all__ = ["convert"]

ROPE_FACTORS = "rope_freqs.weight"
HEAD = "output.weight"
_PIECE_ELEMENTS = 1 << 22
"""Elements dequantised at once: 16 MiB of float32."""

_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<module>\w+)\.(?P<part>weight|bias)")
_PERMUTED = re.compile(r"self_attn\.([qk])_proj\.")


def convert(path: Path, folder: Path) -> GgufMetadata:
    """Make `folder` and write `config.json` and `model.safetensors` (float32) of a GGUF file into it.

    Returns the metadata, since reading them takes seconds.  A file that is refused makes no folder; a fault while
    writing leaves a folder that is not whole, for the caller to remove.

    Raises:
        CheckpointError: as `read_metadata`; or tensors that do not fit the metadata, are of a type that can't be
            dequantised, or a rope that has no counterpart.
        FileExistsError: there is such a folder already.
    """
    reader = open_gguf(path)
    metadata = parse_metadata(reader, path)
    config = _config_json(metadata, _by_name(reader), path)
    tensors = _plan(config, reader, path)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    write_float32(folder / "model.safetensors", tensors)
    return metadata


def _by_name(reader: GGUFReader) -> dict[str, ReaderTensor]:
    return {tensor.name: tensor for tensor in reader.tensors}


def _config_json(metadata: GgufMetadata, tensors: Mapping[str, ReaderTensor], path: Path) -> dict[str, Any]:
    """The configuration in the hub's spelling, completed by what only the tensors say: ties and biases."""
    hyper, tokenizer = metadata.hyperparameters, metadata.tokenizer
    if "token_embd.weight" not in tensors:
        raise CheckpointError(f"{path}: tensor token_embd.weight is missing; the file is no whole model")
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "vocab_size": int(tensors["token_embd.weight"].shape[-1]), "hidden_size": hyper.embedding_length,
        "intermediate_size": hyper.feed_forward_length, "num_hidden_layers": hyper.block_count,
        "num_attention_heads": hyper.head_count, "num_key_value_heads": hyper.head_count_kv,
        "head_dim": hyper.head_size, "max_position_embeddings": hyper.context_length, "hidden_act": "silu",
        "rms_norm_eps": hyper.rms_epsilon, "rope_theta": hyper.rope_theta,
        "rope_scaling": _rope_scaling(metadata, tensors.get(ROPE_FACTORS), path),
        "tie_word_embeddings": HEAD not in tensors, "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors, "torch_dtype": "float32",
        "bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.end_ids),
    }


def _rope_scaling(metadata: GgufMetadata, factors: ReaderTensor | None, path: Path) -> dict[str, Any] | None:
    values = None if factors is None else np.concatenate([*_pieces(factors, np.arange(len(factors.data)))])
    return rope_scaling_json(metadata.hyperparameters, values, path)


def _plan(values: Mapping[str, Any], reader: GGUFReader, path: Path) -> list[StoredTensor]:
    """What will be written, matched with what the configuration demands; nothing is dequantised yet but a first row."""
    config = LlamaConfig.from_json(JsonObject(values, str(path)))
    found = {_hub_name(name, path): tensor for name, tensor in _by_name(reader).items() if name != ROPE_FACTORS}
    parameters = expected_parameters(config)
    match_names(config, parameters, found, path)
    return [_stored(parameter, found[parameter.stored], config, path) for parameter in parameters]


def _hub_name(name: str, path: Path) -> str:
    match = _TENSOR.fullmatch(name)
    if match is None or match["module"] not in _MODULES:
        raise CheckpointError(f"{path}: tensor {name!r} has no place in architecture 'llama'")
    prefix = "" if match["layer"] is None else f"model.layers.{match['layer']}."
    return f"{prefix}{_MODULES[match['module']]}.{match['part']}"


def _stored(parameter: Parameter, tensor: ReaderTensor, config: LlamaConfig, path: Path) -> StoredTensor:
    shape = tuple(int(size) for size in reversed(tensor.shape))
    if shape != parameter.shape:
        raise CheckpointError(f"{path}: tensor {tensor.name} has shape {shape}, the metadata says {parameter.shape}")
    try:
        dequantize(tensor.data[:1], tensor.tensor_type)
    except NotImplementedError:
        raise CheckpointError(f"{path}: tensor {tensor.name} is of type {tensor.tensor_type.name}, which can't be "
                              "dequantised; use another quantisation of this model") from None
    rows = np.arange(shape[0])
    if match := _PERMUTED.search(parameter.stored):
        rows = _hub_rows(config.num_attention_heads if match[1] == "q" else config.num_key_value_heads, shape[0])
    return StoredTensor(name=parameter.stored, shape=shape, pieces=lambda: _pieces(tensor, rows))


def _hub_rows(heads: int, rows: int) -> NDArray[np.int64]:
    """For each row of the hub's order, its row in the file: the converter interleaves a head's two halves
    (llama.cpp, `LlamaModel.permute`), and rows are quantised one by one, so they can be picked before dequantising."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _pieces(tensor: ReaderTensor, rows: NDArray[np.int64]) -> Iterator[NDArray[np.float32]]:
    """The tensor's float32 rows in the order of `rows`, some at a time."""
    step = max(1, _PIECE_ELEMENTS // max(1, tensor.n_elements // len(rows)))
    for start in range(0, len(rows), step):
        yield np.asarray(dequantize(tensor.data[rows[start:start + step]], tensor.tensor_type), dtype=np.float32)
