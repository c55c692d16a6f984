"""The model in the form that each peer reads, all from the values that our engine computes with.

Our engine rounds the checkpoint to bfloat16 when it loads it.  So every form holds the rounded values: a folder of
bfloat16 safetensors, GGUF files, and OpenVINO's own form, made from GGUF by OpenVINO.  In float16, values below 2^-17
lose some of their last bits; all others are the same.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file

from batchgen_beam.transforms.model_store import resolve_model
from benchmarks.race.environments import python_of

__all__ = ["FORMS", "form_of", "prepare"]

FORMS = {"openvino": "openvino", "vllm": "hf", "transformers": "hf", "llama_cpp": "gguf"}
"""Peer → form."""

_GGUF = {"bf16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
         "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16)}

_SAVE_IR = ("import sys, openvino_genai\n"
            "openvino_genai.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)\n")


def form_of(home: Path, form: str, weights: str = "bf16") -> Path:
    """Where a form lies; `weights` names the GGUF file."""
    models = home / "models"
    return models / f"{weights}.gguf" if form == "gguf" else models / form


def _rounded(values: np.ndarray) -> np.ndarray:
    """float32 values as bfloat16 holds them."""
    rounded: np.ndarray = torch.from_numpy(values).to(torch.bfloat16).float().numpy()
    return rounded


def write_hf(folder: Path, place: Path) -> None:
    """The folder with its weights in bfloat16."""
    partial = place.with_name(f"{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(folder, partial, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    config = json.loads((folder / "config.json").read_text())
    (partial / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}, indent=1))
    for file in sorted(folder.glob("*.safetensors")):
        tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
        save_file(tensors, partial / file.name, metadata={"format": "pt"})
    for index in folder.glob("*.index.json"):
        shutil.copy(index, partial)
    shutil.rmtree(place, ignore_errors=True)
    partial.rename(place)


def _copy_fields(fields: Iterable[gguf.ReaderField], writer: gguf.GGUFWriter) -> None:
    """All of the source's metadata, save what the writer adds itself."""
    for field in fields:
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)


def write_gguf(source: Path, place: Path, weights: str) -> None:
    """The GGUF file with matrices in `weights` (bf16 or f16) and vectors in float32, all rounded to bfloat16 first."""
    reader = gguf.GGUFReader(source)
    kind, file_type = _GGUF[weights]
    partial = place.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, reader.fields["general.architecture"].contents())
    _copy_fields(reader.fields.values(), writer)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        values = _rounded(dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape))
        stored = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else kind
        writer.add_tensor(tensor.name, quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(place)


def write_openvino(home: Path, folder: Path, place: Path) -> None:
    """OpenVINO's form; it writes its files beside the GGUF file that it reads."""
    partial = place.with_name(f"{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    source = partial / "f16.gguf"
    source.hardlink_to(form_of(home, "gguf", "f16"))
    subprocess.run([str(python_of(home, "openvino")), "-c", _SAVE_IR, str(source)], check=True)
    source.unlink()
    if not (partial / "openvino_model.bin").is_file():
        raise SystemExit("OpenVINO GenAI did not save the model that it read from GGUF")
    for name in ("config.json", "generation_config.json"):
        shutil.copy(folder / name, partial)
    partial.rename(place)


def _gguf_source(model: str) -> Path:
    source = Path(model)
    if source.suffix != ".gguf":
        raise SystemExit(f"{model}: forms for OpenVINO and llama.cpp are made from a GGUF file")
    return source


def prepare(model: str, cache: Path, home: Path, peers: Iterable[str]) -> Path:
    """Make the forms that these peers need and that are not there; returns our engine's folder.

    `cache` is the project's model cache; the peers' forms lie below `home`, which keeps to one model.
    """
    folder = resolve_model(model, cache)
    (home / "models").mkdir(parents=True, exist_ok=True)
    origin = home / "models" / "origin.txt"
    if origin.is_file() and origin.read_text() != folder.name:
        raise SystemExit(f"{home} holds forms of another model ({origin.read_text()}): give another --home")
    origin.write_text(folder.name)
    for peer in peers:
        place = form_of(home, FORMS[peer])
        if FORMS[peer] == "hf" and not place.exists():
            write_hf(folder, place)
        for weights in {"llama_cpp": ("bf16", "f16"), "openvino": ("f16",)}.get(peer, ()):
            if not form_of(home, "gguf", weights).exists():
                write_gguf(_gguf_source(model), form_of(home, "gguf", weights), weights)
        if peer == "openvino" and not place.exists():
            write_openvino(home, folder, place)
    return folder
