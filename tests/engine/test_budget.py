"""Laws of the page budget: it counts what pages take, scales included."""

from __future__ import annotations

import pytest
import torch

from batchgen_beam.engine.budget import page_budget
from batchgen_beam.engine.executor import Executor
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.interface import CacheKind, GroupKey
from batchgen_beam.settings import EngineSettings
from tests.determinism.models import tiny_llama

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
