"""The determinism law for experts, latent attention and windows: sub-batches and lost pages change no bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from batchgen_beam.engine.stats import EngineFacts
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.records import Prompt, RowKey, SamplingParams, token_array
from batchgen_beam.settings import EngineSettings
from batchgen_beam.weights.loader import load_model
from tests.determinism.law import Law
from tests.models.tiny import TINIES, make_reference

FAMILIES = ("mixtral", "deepseek_v3", "gpt_oss")
ROWS = 9
ATTENTION, EXPERTS = (1, 3, 8, 0), (1, 16, 0)
"""Rows of an attention sub-batch (B_attn) and tokens of an expert batch (B_moe), 0: all."""


def prompts() -> list[Prompt]:
    """Greedy and sampled rows, of which every other one fills a page of 64 tokens while it generates."""
    found = []
    for i in range(ROWS):
        draw = random.Random(i)
        ids = token_array(draw.randrange(3, 300) for _ in range(56 + i if i % 2 else 2 + i))
        params = SamplingParams(temperature=[0.0, 1.0][i % 2], top_p=0.95, seed=i, max_tokens=8 + i, logprobs=2)
        found.append(Prompt(key=RowKey(f"row-{i}", "0" * 64), token_ids=ids, params=params))
    return found


@pytest.fixture(scope="module")
def laws(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Law]:
    """The law of a tiny random model, by family."""
    def get(family: str) -> Law:
        kernels = TorchKernels(torch.float32)
        tiny = replace(TINIES[family], keys={**TINIES[family].keys, "num_hidden_layers": 2})
        folder = make_reference(tiny, tmp_path_factory.mktemp("tiny") / "model").folder
        settings = EngineSettings(dtype="float32", max_rows=ROWS, step_tokens=256, prefill_chunk=48, kv_memory=1 << 26)
        facts = EngineFacts(eos_ids=frozenset({7, 77}), text_vocabulary=300, content_print="tiny", numeric_print="here")
        return Law(model=load_model(folder, kernels), kernels=kernels, facts=facts, settings=settings,
                   prompts=prompts())

    return cache(get)


@pytest.mark.parametrize("family", FAMILIES)
def test_sub_batches_change_no_bit(family: str, laws: Callable[[str], Law]) -> None:
    """Nine rows together, by sub-batches of every pair of sizes, have the bits of each row alone."""
    law = laws(family)
    reference = law.alone()
    for attention in ATTENTION:
        for expert in EXPERTS:
            assert law.sub_batched(attention, expert) == reference, (attention, expert)


@pytest.mark.parametrize("family", FAMILIES)
def test_lost_pages_change_no_bit_in_sub_batches(family: str, laws: Callable[[str], Law]) -> None:
    """By every pair of sizes, with rows held on the host tier and rows evicted and computed again: the same bits."""
    law = laws(family)
    reference = law.batched(ROWS)
    for attention in ATTENTION:
        for expert in EXPERTS:
            churned, churn = law.churned(1, 12, 40, times=1, attention_batch=attention, expert_batch=expert)
            assert len(churn.holds) >= ROWS // 2
            assert len(churn.evictions) >= ROWS // 2
            assert churned == reference, (attention, expert)
