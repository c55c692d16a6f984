"""From a checked checkpoint folder to a model: tensors one at a time, cast once, each exactly once.

Owns the reading of tensors and the choice of the model class by configuration.  Does not know what makes a checkpoint
valid (`checkpoint`), names (`name_tables`), kernels, sequences or Beam.  Weights that are not finite are let through:
the rows that meet them fail by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import safe_open
from torch import Tensor

from batchgen_beam.config.base import ModelConfig
from batchgen_beam.config.families.deepseek import MlaConfig
from batchgen_beam.config.families.fake import FakeConfig
from batchgen_beam.config.families.gpt_oss import GptOssConfig
from batchgen_beam.config.families.llama import LlamaConfig
from batchgen_beam.config.families.mistral import MixtralConfig
from batchgen_beam.config.families.qwen import Qwen3MoeConfig
from batchgen_beam.errors import CheckpointError
from batchgen_beam.models.deepseek import DeepseekModel
from batchgen_beam.models.fake import FakeModel
from batchgen_beam.models.gpt_oss import GptOssModel
from batchgen_beam.models.interface import KernelSet, Model
from batchgen_beam.models.llama import LlamaModel
from batchgen_beam.models.mixtral import MixtralModel
from batchgen_beam.models.parameters import TensorSource
from batchgen_beam.models.qwen3_moe import Qwen3MoeModel
from batchgen_beam.weights.checkpoint import check_checkpoint
from batchgen_beam.weights.headers import TensorFacts
from batchgen_beam.weights.parameter import Cut, Parameter
from batchgen_beam.weights.quantized_reader import read_quantized, read_quantized_expert
from batchgen_beam.weights.quantized_storage import QuantizedTensor, StoredTensor

__all__ = ["TensorReader", "build_model", "load_model"]


class TensorReader:
    """Gives each parameter once, in the run's dtype; holds no tensor itself and closes its files at the end."""

    def __init__(self, tensors: Mapping[str, StoredTensor], parameters: Mapping[str, Parameter], dtype: torch.dtype,
                 device: torch.device) -> None:
        self._left = dict(tensors)
        self._parameters = parameters
        self._dtype, self._device = dtype, device
        self._open = ExitStack()
        self._files: dict[Path, safe_open] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._open.close()
        assert kind is not None or not self._left, f"parameters that the model never asked for: {sorted(self._left)}"

    def get(self, parameter: str) -> Tensor:
        """A copy that outlives the file, rounded once to the run's dtype, or float32 where the table says so; a second
        request is our own mistake."""
        assert parameter in self._left, f"{parameter} was asked for twice, or is no parameter of this model"
        tensor, row = self._left.pop(parameter), self._parameters[parameter]
        dtype = torch.float32 if row.exact else self._dtype
        if isinstance(tensor, QuantizedTensor):
            return self._dequantised(tensor, row, dtype).to(self._device)
        return self._stored(tensor, row.cut).to(device=self._device, dtype=dtype, copy=True)

    def _dequantised(self, tensor: QuantizedTensor, row: Parameter, dtype: torch.dtype) -> Tensor:
        if row.cut is None:
            return read_quantized(tensor, row.shape, self._part, dtype)
        assert row.stored_shape is not None, row.name
        return row.cut.take(read_quantized_expert(tensor, row.stored_shape, row.cut.expert, self._part, dtype))

    def _part(self, tensor: TensorFacts) -> Any:
        return self._file(tensor.file).get_slice(tensor.name)  # type: ignore[no-untyped-call]

    def _stored(self, tensor: TensorFacts, cut: Cut | None) -> Tensor:
        """As the file has it; of a tensor of all experts no other one is read."""
        part = self._part(tensor)
        whole: Tensor = part[...] if cut is None else part[cut.expert : cut.expert + 1]
        return whole if cut is None else cut.take(whole[0])

    def _file(self, path: Path) -> safe_open:
        if path not in self._files:
            self._files[path] = self._open.enter_context(safe_open(path, framework="pt"))
        return self._files[path]


def load_model(folder: Path, kernels: KernelSet) -> Model:
    """The model in `folder`, its weights in `kernels.dtype` on `kernels.device`.

    Raises `CheckpointError` for any fault of the folder; never leaves a parameter unfilled.
    """
    facts = check_checkpoint(folder)
    with TensorReader(facts.tensors, facts.parameters, kernels.dtype, kernels.device) as reader:
        return build_model(facts.config, reader.get, kernels)


def build_model(config: ModelConfig, get: TensorSource, kernels: KernelSet) -> Model:
    """The model of a configuration; `get` gives each parameter, and is asked once for it."""
    match config:
        case LlamaConfig():
            return LlamaModel(config, get, kernels)
        case MixtralConfig():
            return MixtralModel(config, get, kernels)
        case Qwen3MoeConfig():
            return Qwen3MoeModel(config, get, kernels)
        case MlaConfig():
            return DeepseekModel(config, get, kernels)
        case GptOssConfig():
            return GptOssModel(config, get, kernels)
        case FakeConfig():
            return FakeModel(config, kernels)
    raise CheckpointError(f"{config.name_or_path}: no model is written for {type(config).__name__}")
