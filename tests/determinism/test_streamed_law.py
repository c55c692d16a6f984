"""Weights that are streamed from disk give the bits of weights in memory, in whatever parts a batch is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from batchgen_beam.engine.stats import EngineFacts
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.interface import KernelSet, Model
from batchgen_beam.records import Prompt, RowKey, SamplingParams, token_array
from batchgen_beam.settings import EngineSettings
from batchgen_beam.weights.loader import load_model
from batchgen_beam.weights.tiered_loader import TieredModel
from tests.determinism.law import Law
from tests.determinism.models import native_kernels
from tests.kernels.sets import NEEDS_NATIVE
from tests.models import tiny_llama
from tests.models.tiny import TINIES, VOCABULARY, random_model
from tests.weights.tiering import tiered

SPARSE = ("mixtral", "deepseek_v3", "gpt_oss")
LENGTHS = (1, 70, 9, 64, 3)
ATTENTION = (1, 3, 8, 0)
EXPERT = (1, 16, 0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints by name, made once each."""
    def get(name: str) -> Path:
        folder = tmp_path_factory.mktemp("streamed") / "model"
        if name == "llama":
            torch.manual_seed(0)
            LlamaForCausalLM(tiny_llama.TINIES["mlp_bias, eps 1e-2"].config()).save_pretrained(folder)
        else:
            random_model(TINIES[name], 0).save_pretrained(folder)
        return folder

    return cache(get)


def law_of(model: Model, kernels: KernelSet) -> Law:
    """Greedy and seeded rows on it, two of which share the beginning of their prompts."""
    facts = EngineFacts(eos_ids=frozenset(), text_vocabulary=VOCABULARY, content_print="c", numeric_print="n")
    settings = EngineSettings(dtype=str(kernels.dtype).removeprefix("torch."), max_rows=8, step_tokens=256,
                              prefill_chunk=32, kv_memory=1 << 26)
    prompts = [Prompt(key=RowKey(f"row-{i}", "0" * 64),
                      token_ids=token_array([(7 * n * n + 3 * n + (i if n < 60 and i != 3 else 1)) % VOCABULARY
                                             for n in range(length)]),
                      params=SamplingParams(temperature=[0.0, 0.9][i % 2], seed=i, max_tokens=6, logprobs=3))
               for i, length in enumerate(LENGTHS)]
    return Law(model=model, kernels=kernels, facts=facts, settings=settings, prompts=prompts)


def streams(model: TieredModel) -> None:
    """It did stream, and every buffer is where it should be."""
    assert model.stream is not None
    assert model.stream.stats().read_units > len(model.residency.streamed)
    model.stream.check_integrity()


@pytest.mark.parametrize("name", SPARSE)
def test_sub_batches_and_tiers_reach_no_bit(name: str, folders: Callable[[str], Path], tmp_path: Path) -> None:
    """All sizes of sub-batches, with weights in memory and with nearly all of them streamed, and evictions and two
    tiers of KV pages under streaming: the same bits."""
    kernels = TorchKernels(torch.float32)
    law = law_of(load_model(folders(name), kernels), kernels)
    reference = law.batched(len(LENGTHS))
    assert law.sub_batched(3, 16) == reference
    model = tiered(folders(name), kernels, tmp_path)
    streamed = replace(law, model=model.model)
    for attention in ATTENTION:
        for expert in EXPERT:
            assert streamed.sub_batched(attention, expert) == reference, (attention, expert)
    streams(model)
    assert streamed.alone() == reference
    pages = 24 if name == "gpt_oss" else 12
    churned, churn = streamed.churned(every=2, host_pages=pages // 2, pages=pages)
    assert churned == reference
    assert sum(churn.holds.values()) > 2
    assert sum(churn.evictions.values()) > 2


@pytest.mark.parametrize("name", [*SPARSE, "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_how_much_is_streamed_reaches_no_bit(name: str, dtype: torch.dtype, folders: Callable[[str], Path],
                                             tmp_path: Path) -> None:
    """From the least memory that will do to nearly all, in both dtypes: the bits of weights in memory."""
    kernels = TorchKernels(dtype)
    law = law_of(load_model(folders(name), kernels), kernels)
    reference = law.batched(len(LENGTHS))
    for share in (0.0, 0.4, 0.9):
        model = tiered(folders(name), kernels, tmp_path, share=share)
        assert replace(law, model=model.model).batched(len(LENGTHS)) == reference, share
        streams(model)


@NEEDS_NATIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_oss"])
def test_native_panels_are_streamed(name: str, dtype: torch.dtype, folders: Callable[[str], Path],
                                    tmp_path: Path) -> None:
    """On the native kernels, which read the buffers in place, expert by expert: the bits of weights in memory, where a
    Llama's pass is fused and experts go together."""
    kernels = native_kernels(dtype, threads=2)
    law = law_of(load_model(folders(name), kernels), kernels)
    reference = law.batched(len(LENGTHS))
    assert law.sub_batched(3, 16) == reference
    for share in (0.0, 0.6):
        model = tiered(folders(name), kernels, tmp_path, share=share)
        streamed = replace(law, model=model.model)
        assert streamed.batched(len(LENGTHS)) == reference, share
        assert streamed.sub_batched(3, 16) == reference, share
        streams(model)
