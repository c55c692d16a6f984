"""Cases about mixtures of experts: text that is fluent at first and then drifts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.weights.loader import load_model
from tests.models.paged import PagedRun, greedy
from tests.models.tiny import NEW_TOKENS, TINIES, Reference, make_reference

KERNELS = TorchKernels(torch.float32)
TOLERANCE = 1e-4
VISIBLE = 1e-2


def difference(folder: Path, reference: Reference) -> float:
    """The largest of all logits of the reference's prompts."""
    model = load_model(folder, KERNELS)
    return max(float((PagedRun(model, KERNELS).forward(("x", prompt), every=True) - logits).abs().max())
               for prompt, logits in zip(reference.prompts, reference.logits, strict=True))


@pytest.mark.parametrize("chosen", [1, 3])
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_router_renormalisation_flag(name: str, chosen: int, tmp_path: Path) -> None:
    """Case 40: `norm_topk_prob` true and false are both as in the reference, also with one expert of each token, whose
    weight is then 1 or its own score; ignoring the flag, either way, would be seen."""
    references = {}
    for flag in (True, False):
        tiny = replace(TINIES[name], keys={**TINIES[name].keys, "norm_topk_prob": flag, "num_experts_per_tok": chosen})
        references[flag] = make_reference(tiny, tmp_path / str(flag))
        assert difference(references[flag].folder, references[flag]) < TOLERANCE
        model = load_model(references[flag].folder, KERNELS)
        for prompt, expected in zip(references[flag].prompts, references[flag].greedy, strict=True):
            assert tuple(greedy(PagedRun(model, KERNELS), "x", prompt, NEW_TOKENS)) == expected
    configs = {flag: (reference.folder / "config.json").read_text() for flag, reference in references.items()}
    for flag, reference in references.items():
        (reference.folder / "config.json").write_text(configs[not flag])
        assert difference(reference.folder, reference) > VISIBLE


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_one_expert_of_each_token(name: str, tmp_path: Path) -> None:
    """Case 40: routers that always renormalise give a single expert the weight 1, as in the reference."""
    tiny = replace(TINIES[name], keys={**TINIES[name].keys, "num_experts_per_tok": 1})
    reference = make_reference(tiny, tmp_path / "model")
    assert difference(reference.folder, reference) < TOLERANCE
