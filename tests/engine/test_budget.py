"""Laws of the page budget: it counts what pages take, scales included."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from batchgen_beam.config.model_sizes import model_sizes
from batchgen_beam.config.sizes import WeightForm
from batchgen_beam.engine.budget import page_budget
from batchgen_beam.engine.executor import Executor
from batchgen_beam.engine.model_load import ModelLoad
from batchgen_beam.engine.paging import live_pages
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.interface import CacheKind, GroupKey
from batchgen_beam.settings import EngineSettings
from batchgen_beam.weights.random_model import random_model
from tests.determinism.models import tiny_llama
from tests.weights.test_random_model import config_of

GROUP = GroupKey(CacheKind.PAGED)


@pytest.mark.parametrize(("kv_dtype", "head_bytes"), [(torch.bfloat16, 32 * 2), (torch.int8, 32 + 4)])
def test_pages_are_as_many_as_their_bytes_fit(kv_dtype: torch.dtype, head_bytes: int) -> None:
    """Two layers, keys and values, two KV heads of 32 values: what is allocated is the memory given, to a page."""
    kernels = TorchKernels(torch.bfloat16, kv_dtype=kv_dtype)
    model = tiny_llama(kernels)
    token_bytes = 2 * 2 * 2 * head_bytes
    memory = 100 * 64 * token_bytes + 17
    budget = page_budget(model, EngineSettings(kv_memory=memory, kv_host_memory=memory // 2))
    assert budget.token_bytes == token_bytes
    assert (budget.device[GROUP], budget.host[GROUP]) == (101, 51)
    executor = Executor(model, kernels, budget)
    for caches, pages in ((executor._caches, 101), (executor._host, 51)):
        assert sum(cache.nbytes for layer in caches for cache in layer.values()) == pages * 64 * token_bytes


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (3, 64), (5, 500), (40, 900)])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("name", ["gpt_oss", "mixtral, window", "deepseek_v3"])
def test_memory_that_was_planned_holds_the_planned_rows(name: str, kv_dtype: str, rows: int, tokens: int,
                                                        tmp_path: Path) -> None:
    """With one byte less it would not; a row that enters has all its pages, and those that run what their windows
    touch."""
    config = replace(config_of(name, tmp_path), max_position_embeddings=4096)
    kernels = TorchKernels(torch.float32, kv_dtype=torch.int8 if kv_dtype == "int8" else None)
    model = random_model(config, kernels, seed=0, room=1 << 30)
    load = ModelLoad.of(model_sizes(config), WeightForm(dtype="float32"), kv_dtype)
    memory = load.kv_bytes(rows, tokens)

    def pages(memory: int) -> dict[GroupKey, int]:
        budget = page_budget(model, EngineSettings(max_rows=rows, kv_memory=memory))
        return {group: count - 1 for group, count in budget.device.items()}

    found = pages(memory)
    for group, count in found.items():
        entering = len(live_pages(group, 0, tokens))
        running = max(len(live_pages(group, done, done + 1)) for done in range(tokens))
        assert count >= entering + (rows - 1) * running
        assert group.window is not None or count >= rows * entering
    if rows * tokens > 64:  # else the least that is taken
        assert pages(memory - 1) != found


def test_windows_leave_the_rest_to_others(tmp_path: Path) -> None:
    """Beyond what 4 rows can use of a window of 8 tokens all memory is for keys and values of the whole past; a row as
    long as the context is held as soon as there is memory for it."""
    config = replace(config_of("gpt_oss", tmp_path), max_position_embeddings=4096)
    model = random_model(config, TorchKernels(torch.float32), seed=0, room=1 << 30)
    context = model.context_limit // 64
    page = 64 * 2 * sum(spec.item_bytes for spec in model.layers[0].cache_spec())
    whole = page_budget(model, EngineSettings(max_rows=4, kv_memory=2 * context * page))
    assert set(whole.device.values()) == {1 + context}
    assert whole.longest_row == model.context_limit
    more = page_budget(model, EngineSettings(max_rows=4, kv_memory=5 * context * page))
    windowed, full = (more.device[group] - 1 for group in (GroupKey(CacheKind.WINDOWED, 8), GROUP))
    assert windowed == 3 * 3 + context
    assert full == 5 * context - windowed
