"""The native kernel set against the torch reference in float32: the demo model on a text, tiny models of odd shapes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.interface import KernelSet
from batchgen_beam.weights.loader import load_model
from tests.kernels.sets import EMULATED, HIGHEST, NATIVE, NEEDS_NATIVE, native
from tests.models.paged import PagedRun
from tests.models.texts import text_ids
from tests.models.tiny_llama import Tiny, make_reference

LOG = logging.getLogger(__name__)
POSITIONS, CHUNK, PAGE = 2000, 300, 64
EACH = pytest.mark.parametrize(("dtype", "path"), NATIVE + EMULATED)
SHAPES = [(64, 3, 1, 331), (80, 9, 3, 343), (96, 2, 2, 517), (128, 5, 1, 337), (256, 3, 3, 349), (64, 10, 2, 515)]
"""Head size, heads, KV heads, vocabulary."""


def logits_of(folder: Path, kernels: KernelSet, ids: list[int]) -> Iterator[Tensor]:
    """Float32 logits [CHUNK, V] after each token of one row, chunk by chunk."""
    run = PagedRun(load_model(folder, kernels), kernels, pages=len(ids) // PAGE + 5, page_tokens=PAGE)
    for start in range(0, len(ids), CHUNK):
        yield run.forward(("row", ids[start : start + CHUNK]), every=True)


def apart(found: Iterator[Tensor], reference: list[Tensor]) -> tuple[float, float]:
    """The largest difference of logits, and the share of positions with the same best token."""
    largest, same = 0.0, 0
    for logits, expected in zip(found, reference, strict=True):
        largest = max(largest, float((logits - expected).abs().max()))
        same += int((logits.argmax(1) == expected.argmax(1)).sum())
    return largest, same / sum(len(expected) for expected in reference)


def check_demo_model(folder: Path, sets: Iterable[tuple[torch.dtype, str]]) -> None:
    """float32 within rounding of the reference, bfloat16 no further from it than torch in bfloat16."""
    ids = text_ids(folder, POSITIONS)
    reference = list(logits_of(folder, TorchKernels(torch.float32), ids))
    half = apart(logits_of(folder, TorchKernels(torch.bfloat16), ids), reference)
    LOG.info("torch bfloat16: logits within %.2g, top-1 %.4f", *half)
    for dtype, path in sets:
        largest, same = apart(logits_of(folder, native(dtype, path, 2), ids), reference)
        LOG.info("%s %s: logits within %.2g, top-1 %.4f", path, dtype, largest, same)
        if dtype is torch.float32:
            assert largest < 1e-3
            assert same > 0.999
        else:
            assert largest < 1.5 * half[0]
            assert same > max(half[1] - 0.01, 0.95)


@pytest.mark.smollm2
@NEEDS_NATIVE
def test_the_demo_model_on_one_row_of_2000_positions(smollm2_folder: Path) -> None:
    """The highest path of each dtype that is taken unasked; figures under `--log-cli-level=INFO`."""
    check_demo_model(smollm2_folder, HIGHEST.items())


@pytest.mark.long
@pytest.mark.smollm2
@NEEDS_NATIVE
@pytest.mark.timeout(1200)
def test_the_demo_model_on_one_row_of_2000_positions_on_every_path(smollm2_folder: Path) -> None:
    """All that this machine has."""
    check_demo_model(smollm2_folder, NATIVE)


@EACH
@pytest.mark.parametrize("shape", SHAPES, ids=["{} x {}, {} KV, V {}".format(*shape) for shape in SHAPES])
def test_tiny_models_of_odd_shapes(dtype: torch.dtype, path: str, shape: tuple[int, int, int, int],
                                   tmp_path: Path) -> None:
    """Head sizes from 64 to 256, odd numbers of heads, one to three KV heads, vocabularies that nothing divides."""
    size, heads, kv_heads, vocabulary = shape
    keys = {"hidden_size": 90, "intermediate_size": 130, "head_dim": size, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "vocab_size": vocabulary}
    reference = make_reference(Tiny(keys=keys), tmp_path / "model")
    kernels = native(dtype, path)
    model = load_model(reference.folder, kernels)
    for prompt, logits in zip(reference.prompts, reference.logits, strict=True):
        found = PagedRun(model, kernels, page_tokens=PAGE).forward(("row", prompt), every=True)
        assert (found - logits).abs().max() < (1e-4 if dtype is torch.float32 else 0.1)
