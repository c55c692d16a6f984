"""The two models of the determinism tests, and their rows."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import Tensor

from batchgen_beam.config.families.llama import LlamaConfig
from batchgen_beam.engine.stats import EngineFacts
from batchgen_beam.kernels.native_set import NativeKernels
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.interface import KernelSet
from batchgen_beam.models.llama import LlamaModel
from batchgen_beam.records import Prompt, RowKey, SamplingParams, token_array
from batchgen_beam.settings import EngineSettings
from batchgen_beam.text.tokenizer import Tokenizer
from batchgen_beam.weights.loader import load_model
from tests.determinism.law import Law
from tests.kernels.sets import HIGHEST, native

CONTEXT = 1600


def native_kernels(dtype: torch.dtype, *, threads: int = 2, kv_dtype: torch.dtype | None = None) -> NativeKernels:
    """The highest path that is taken unasked."""
    return native(dtype, HIGHEST[dtype], threads, kv_dtype=kv_dtype)


TINY = LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=4,
                   num_key_value_heads=2, max_position_embeddings=CONTEXT)
"""Grouped heads, K = 1,536 in one product, since that is where kernels differ by batch size."""


def tiny_llama(kernels: KernelSet) -> LlamaModel:
    """A random Llama."""
    hidden, width, vocabulary = TINY.hidden_size, TINY.intermediate_size, TINY.vocab_size
    heads, kv_heads, size = TINY.num_attention_heads, TINY.num_key_value_heads, 32
    generator = torch.Generator().manual_seed(3)
    sizes = {"q": (heads * size, hidden), "k": (kv_heads * size, hidden), "v": (kv_heads * size, hidden),
             "o": (hidden, heads * size), "gate": (width, hidden), "up": (width, hidden), "down": (hidden, width),
             "embedding": (vocabulary, hidden), "head": (vocabulary, hidden)}

    def get(name: str) -> Tensor:
        part = name.split(".")[-1]
        if "norm" in name:
            return 1 + 0.1 * torch.randn(hidden, generator=generator)
        rows, columns = sizes[part]
        return torch.randn(rows, columns, generator=generator) * columns**-0.5 * 1.3

    return LlamaModel(TINY, get, kernels)


def rows(count: int, vocabulary: int, *, longest: int, new_tokens: int) -> list[Prompt]:
    """Greedy and seeded rows in turn; every eighth prompt is nearly `longest` tokens, the rest under 150.

    The long ones and the fourth before each begin with the same 140 tokens, or as many of them as they have.
    """
    prompts = []
    common = [random.Random("common").randrange(3, vocabulary) for _ in range(140)]
    for i in range(count):
        draw = random.Random(i)
        length = longest - i if i % 8 == 5 else 130 + i % 30 if i % 8 == 1 else 1 + draw.randrange(150)
        params = SamplingParams(temperature=[0.0, 0.8, 1.2][i % 3], top_k=[0, 40][i % 2], top_p=[1.0, 0.9, 0.95][i % 3],
                                seed=i % 4, max_tokens=new_tokens + i % 5, logprobs=5)
        own = [draw.randrange(3, vocabulary) for _ in range(length)]
        ids = token_array(common[:length] + own[140:] if i % 8 in (1, 5) else own)
        prompts.append(Prompt(key=RowKey(f"row-{i}", "0" * 64), token_ids=ids, params=params))
    return prompts


def tiny_law(count: int, *, longest: int, new_tokens: int, kernels: KernelSet | None = None,
             eos_ids: frozenset[int] = frozenset()) -> Law:
    """The tiny Llama in float32, on the torch kernel set if no other is given."""
    kernels = kernels or TorchKernels(torch.float32)
    facts = EngineFacts(eos_ids=eos_ids, text_vocabulary=500, content_print="tiny", numeric_print="here")
    settings = EngineSettings(dtype="float32", max_rows=64, step_tokens=256, prefill_chunk=64, kv_memory=1 << 30)
    return Law(model=tiny_llama(kernels), kernels=kernels, facts=facts, settings=settings,
               prompts=rows(count, 500, longest=longest, new_tokens=new_tokens))


def smollm2_law(folder: Path, count: int, *, longest: int, new_tokens: int, kernels: KernelSet | None = None) -> Law:
    """SmolLM2-135M-Instruct, converted into `folder`, in bfloat16; random ids as prompts, no row ends early.

    On the torch kernel set if no other is given.
    """
    kernels = kernels or TorchKernels(torch.bfloat16)
    model = load_model(folder, kernels)
    vocabulary = Tokenizer.load(folder).vocabulary_size
    facts = EngineFacts(eos_ids=frozenset(), text_vocabulary=vocabulary, content_print="smollm2", numeric_print="here")
    settings = EngineSettings(max_rows=64, step_tokens=512, prefill_chunk=64, kv_memory=3 << 30, max_context=CONTEXT)
    return Law(model=model, kernels=kernels, facts=facts, settings=settings,
               prompts=rows(count, vocabulary, longest=longest, new_tokens=new_tokens))
