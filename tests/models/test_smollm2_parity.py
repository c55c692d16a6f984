"""The demo model, from its GGUF file, against transformers that loads the same file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.interface import Model
from batchgen_beam.text.tokenizer import Tokenizer
from batchgen_beam.weights.loader import load_model
from tests.models.paged import PagedRun, greedy

TOLERANCE = 1e-4
"""The contract, on logits up to 41.  Measured are 5.3e-5 to 6.3e-5 over the five prompts, float32 sums in other orders
through 30 layers; 1.3e-4 was measured before products summed K in fixed spans."""

VISIBLE = 1e-3

GREEDY_TOKENS = 16
KERNELS = TorchKernels(torch.float32)
PROMPTS = (
    "The capital of France is",
    "<|im_start|>user\nTranslate to German: the cat sleeps on the red sofa.<|im_end|>\n<|im_start|>assistant\n",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return ",
    "Order 4711 was shipped on 2024-03-15 to Lyon; order 4712 on 2024-03-17 to",
    "<|im_start|>user\nIs this review positive or negative? 'The zip broke on day 2 🙁'<|im_end|>\n"
    "<|im_start|>assistant\n",
)

pytestmark = pytest.mark.smollm2


@pytest.fixture(scope="module")
def ours(smollm2_folder: Path) -> tuple[Model, Tokenizer]:
    """The model out of the converted folder, and its tokenizer."""
    return load_model(smollm2_folder, KERNELS), Tokenizer.load(smollm2_folder)


@pytest.fixture(scope="module")
def theirs(smollm2_gguf: Path) -> LlamaForCausalLM:
    """Transformers' model with the configuration and the tensors that its own GGUF reader finds.

    `from_pretrained(gguf_file=...)` does the same, but wants one more package only to place the tensors.
    """
    config = LlamaConfig.from_dict(load_gguf_checkpoint(smollm2_gguf)["config"])
    assert config.rope_parameters["rope_theta"] == 100000.0
    model = LlamaForCausalLM._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    found = load_gguf_checkpoint(smollm2_gguf, return_tensors=True, model_to_load=model)["tensors"]
    missing, unknown = model.load_state_dict(found, strict=False)
    assert (missing, unknown) == (["lm_head.weight"], [])  # tied: it is the embedding table, which was filled
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model


@torch.no_grad()
def check(prompt: str, ours: tuple[Model, Tokenizer], theirs: LlamaForCausalLM) -> None:
    """Logits of all prompt tokens and the first greedy tokens.

    One reference pass over prompt and answer is enough: if each answered token is the reference's best one after the
    tokens before it, then the reference would have generated the same.
    """
    model, tokenizer = ours
    ids = list(tokenizer.encode(prompt, add_bos=False))
    found = greedy(PagedRun(model, KERNELS, page_tokens=64), "x", ids, GREEDY_TOKENS)
    expected = theirs(torch.tensor([ids + found]), use_cache=False).logits[0]
    logits = PagedRun(model, KERNELS, page_tokens=64).forward(("x", ids), every=True)
    assert float((logits - expected[:len(ids)]).abs().max()) < TOLERANCE
    assert found == expected[len(ids) - 1:-1].argmax(1).tolist()


@pytest.mark.parametrize("prompt", PROMPTS[:2])
def test_two_prompts_answer_as_transformers(prompt: str, ours: tuple[Model, Tokenizer],
                                            theirs: LlamaForCausalLM) -> None:
    """On equal ids, float32 logits are within 1e-4 and 16 greedy tokens are equal."""
    check(prompt, ours, theirs)


@torch.no_grad()
def test_another_rope_base_is_seen(ours: tuple[Model, Tokenizer], theirs: LlamaForCausalLM, smollm2_folder: Path,
                                   tmp_path: Path) -> None:
    """The comparison can fail: with rope_theta 10,000, the usual default, logits differ clearly."""
    config = json.loads((smollm2_folder / "config.json").read_text())
    assert config["rope_theta"] == 100_000
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_theta": 10_000.0}))
    (tmp_path / "model.safetensors").symlink_to(smollm2_folder / "model.safetensors")
    ids = list(ours[1].encode(PROMPTS[0], add_bos=False))
    logits = PagedRun(load_model(tmp_path, KERNELS), KERNELS, page_tokens=64).forward(("x", ids), every=True)
    assert float((logits - theirs(torch.tensor([ids]), use_cache=False).logits[0]).abs().max()) > VISIBLE


@pytest.mark.long
@pytest.mark.parametrize("prompt", PROMPTS[2:])
def test_the_other_prompts_answer_as_transformers(prompt: str, ours: tuple[Model, Tokenizer],
                                                  theirs: LlamaForCausalLM) -> None:
    """On equal ids, float32 logits are within 1e-4 and 16 greedy tokens are equal: the rest of five prompts."""
    check(prompt, ours, theirs)
