"""What weights need in memory: from the configuration alone as much as the loader finds, and as the sizes say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from batchgen_beam.config.model_registry import load_config
from batchgen_beam.config.model_sizes import model_sizes
from batchgen_beam.config.sizes import DTYPE_BYTES, Matrix, WeightForm
from batchgen_beam.kernels.packing import packing_of
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.transforms.machine_times import head_dtype, run_needs
from batchgen_beam.weights.checkpoint import check_checkpoint
from batchgen_beam.weights.packed_format import PAGE
from batchgen_beam.weights.tiered_loader import plan_copy
from tests.determinism.models import native_kernels
from tests.kernels.sets import NEEDS_NATIVE
from tests.models import tiny_llama
from tests.models.tiny import QUANTISED, TINIES, make_reference, random_model

ON = pytest.mark.parametrize(("kernels", "dtype"), [
    ("torch", torch.float32), ("torch", torch.bfloat16),
    pytest.param("native", torch.bfloat16, marks=NEEDS_NATIVE)])


def checkpoint(name: str, folder: Path) -> Path:
    """A tiny one."""
    torch.manual_seed(0)
    if name in tiny_llama.TINIES:
        LlamaForCausalLM(tiny_llama.TINIES[name].config()).save_pretrained(folder)
        return folder
    if name in QUANTISED:
        return make_reference(QUANTISED[name], folder).folder
    random_model(TINIES[name], 0).save_pretrained(folder)
    return folder


@ON
@pytest.mark.parametrize("name", ["plain", "tied, one kv head", "mlp_bias, eps 1e-2", "mixtral", "qwen3_moe", "gpt_oss",
                                  "gpt_oss, mxfp4"])
def test_the_configuration_says_what_the_loader_finds(name: str, kernels: str, dtype: torch.dtype,
                                                      tmp_path: Path) -> None:
    """The same units and the same bytes beside them, however the checkpoint lays out or stores its tensors; those
    bytes are norms, embedding and head, sinks, and routers: exact ones in float32."""
    folder = checkpoint(name, tmp_path / "model")
    chosen = TorchKernels(dtype) if kernels == "torch" else native_kernels(dtype)
    config = load_config(str(folder))
    needs = run_needs(config, chosen)
    _, found = plan_copy(check_checkpoint(folder), chosen, packing_of(chosen))
    assert needs == found
    form = WeightForm(dtype=str(dtype).removeprefix("torch."), head=head_dtype(chosen))
    sizes, number = model_sizes(config), DTYPE_BYTES[form.dtype]
    always = sum(number * (layer.attention.numbers + layer.dense.numbers) + 4 * layer.attention.exact +
                 layer.router.bytes(form) for layer in sizes.layers)
    padding = 0 if kernels == "torch" else sum(
        _padded(chosen, matrix) - form.matrix("", matrix) for layer in sizes.layers for matrix in layer.router.matrices)
    assert needs.fixed == sizes.embedding.bytes(form) + sizes.head_bytes(form) + always + padding
    weights = sum(layer.bytes(form) for layer in sizes.layers) - always
    room = PAGE * len(needs.units) + (0 if kernels == "torch" else weights)
    assert weights <= needs.total_bytes - needs.fixed <= weights + room


def _padded(kernels: object, matrix: Matrix) -> int:
    """Bytes of panels, which have whole rows of outputs."""
    return packing_of(kernels).exact_bytes(matrix.outputs, matrix.inputs)  # type: ignore[arg-type]
