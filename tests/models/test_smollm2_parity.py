"""The demo model, from its GGUF file, against transformers that loads the same file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.interface import Model
from batchgen_beam.text.gguf_tokenizer import write_tokenizer
from batchgen_beam.text.tokenizer import Tokenizer
from batchgen_beam.weights.gguf import convert, read_metadata
from batchgen_beam.weights.loader import load_model
from tests.models.paged import PagedRun, greedy

TOLERANCE = 1e-4
"""Float32 sums in other orders through 30 layers: both sides are within 9e-5 of float64, on logits up to 41."""

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
def ours(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Tokenizer]:
    """The model out of the converted folder, and its tokenizer."""
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    convert(smollm2_gguf, folder)
    write_tokenizer(read_metadata(smollm2_gguf), folder)
    model = load_model(folder, KERNELS)
    (folder / "model.safetensors").unlink()
    return model, Tokenizer.load(folder)


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


@pytest.mark.long
@pytest.mark.parametrize("prompt", PROMPTS[2:])
def test_the_other_prompts_answer_as_transformers(prompt: str, ours: tuple[Model, Tokenizer],
                                                  theirs: LlamaForCausalLM) -> None:
    """On equal ids, float32 logits are within 1e-4 and 16 greedy tokens are equal: the rest of five prompts."""
    check(prompt, ours, theirs)
