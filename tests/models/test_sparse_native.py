"""Sparse families with grouped attention on the native kernels: against transformers, and the law of batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from batchgen_beam.weights.loader import load_model
from tests.kernels.sets import HIGHEST, NATIVE, NEEDS_NATIVE, native
from tests.kernels.views import PAGE
from tests.models.paged import PagedRun, greedy
from tests.models.tiny import NEW_TOKENS, TINIES, Reference, make_reference

pytestmark = NEEDS_NATIVE

TOLERANCE = 1e-4
"""As on the torch kernels: sums in float32 in another order; wrong mechanisms are over 1e-3."""

NAMES = [name for name in TINIES if name.startswith(("mixtral", "qwen3_moe", "gpt_oss"))]
PROMPT = [(5 * i * i + 3 * i + 1) % 320 for i in range(45)]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Checkpoints by name, made once each, with heads that fill the native set's vectors."""
    def get(name: str) -> Reference:
        whole_vectors = replace(TINIES[name], keys={**TINIES[name].keys, "head_dim": 32})
        return make_reference(whole_vectors, tmp_path_factory.mktemp("tiny") / "model")

    return cache(get)


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_greedy_tokens_equal_transformers(name: str, references: Callable[[str], Reference]) -> None:
    """As on the torch kernels: every prompt token's logits in float32 within 1e-4, greedy tokens equal."""
    reference, kernels = references(name), native(torch.float32, HIGHEST[torch.float32], 2)
    model = load_model(reference.folder, kernels)
    for prompt, logits, expected in zip(reference.prompts, reference.logits, reference.greedy, strict=True):
        found = PagedRun(model, kernels, page_tokens=PAGE).forward(("x", prompt), every=True)
        assert float((found - logits).abs().max()) < TOLERANCE
        assert tuple(greedy(PagedRun(model, kernels, page_tokens=PAGE), "x", prompt, NEW_TOKENS)) == expected


@pytest.mark.parametrize(("dtype", "path"), NATIVE)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_neither_company_nor_chunks_changes_a_bit(name: str, dtype: torch.dtype, path: str,
                                                  references: Callable[[str], Reference]) -> None:
    """A row's logits have the same bits alone, in chunks and among others, on every path."""
    kernels = native(dtype, path, 2)
    model = load_model(references(name).folder, kernels)
    alone = PagedRun(model, kernels, page_tokens=PAGE).forward(("x", PROMPT), every=True)
    run = PagedRun(model, kernels, page_tokens=PAGE)
    parts = [run.forward(("x", PROMPT[:7]), every=True)]
    parts += [run.forward(("a", PROMPT[3:9]), ("x", PROMPT[7:21]), ("b", PROMPT[:40]), every=True)[6:20]]
    parts += [run.forward(("x", [token]), ("a", [5]))[:1] for token in PROMPT[21:30]]
    parts += [run.forward(("x", PROMPT[30:]), every=True)]
    assert torch.equal(torch.cat(parts), alone)
