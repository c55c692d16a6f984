"""Each cache kind over pages, in chunks and mixed batches, with the torch kernels: the fake models and a tiny Llama."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen_beam.config.families.fake import FakeConfig
from batchgen_beam.config.families.llama import LlamaConfig
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.fake import PRINTABLE, FakeModel
from batchgen_beam.models.interface import Model
from batchgen_beam.models.llama import LlamaModel
from tests.models.paged import PagedRun, greedy

KERNELS = TorchKernels(torch.float32)
TEXTS = {"a": "a", "b": "eight...", "c": "a longer prompt that fills several pages of eight tokens and more", "d": "d"}
PROMPTS = {name: list(text.encode()) for name, text in TEXTS.items()}
KINDS = ("paged", "windowed", "state", "llama")


def fake(kind: str, **keys: Any) -> FakeModel:
    """A fake model; window 11 is shorter than the longest prompt and no multiple of a page."""
    return FakeModel(FakeConfig(kind=kind, window=11, **keys), KERNELS)


def llama() -> LlamaModel:
    """A random Llama of two layers, made without a checkpoint."""
    config = LlamaConfig(vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
    generator = torch.Generator().manual_seed(3)
    sizes = {"q": (32, 32), "k": (16, 32), "v": (16, 32), "o": (32, 32), "gate": (48, 32), "up": (48, 32),
             "down": (32, 48), "embedding": (256, 32), "head": (256, 32)}

    def get(name: str) -> Tensor:
        shape = sizes.get(name.rsplit(".", 1)[-1], (32,))
        return torch.randn(shape, generator=generator) * 0.3 + (len(shape) == 1)

    return LlamaModel(config, get, KERNELS)


def make(kind: str) -> Model:
    """The model that exercises a kind."""
    return llama() if kind == "llama" else fake(kind)


def alone(model: Model, prompt: Sequence[int], count: int = 0) -> tuple[list[int], Tensor]:
    """Greedy ids of a row that is alone, and the logits of all its tokens in one pass."""
    ids = greedy(PagedRun(model, KERNELS), "x", prompt, count) if count else []
    return ids, PagedRun(model, KERNELS).forward(("x", [*prompt, *ids]), every=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 7, 8, 50])
def test_chunks_do_not_show(kind: str, size: int) -> None:
    """However a prompt is cut, each token's logits have the same bits."""
    model, prompt = make(kind), PROMPTS["c"]
    run = PagedRun(model, KERNELS)
    parts = [run.forward(("c", prompt[i:i + size]), every=True) for i in range(0, len(prompt), size)]
    assert torch.equal(torch.cat(parts), alone(model, prompt)[1])


@pytest.mark.parametrize("kind", KINDS)
def test_company_does_not_show(kind: str) -> None:
    """Rows of any length, prefilled and decoded in one batch, answer as alone."""
    model = make(kind)
    expected = {row: alone(model, prompt, 12)[0] for row, prompt in PROMPTS.items()}
    run, ids = PagedRun(model, KERNELS), {row: [] for row in PROMPTS}
    waiting = {row: list(prompt) for row, prompt in PROMPTS.items()}
    for step in range(40):
        chunks = []
        for place, row in enumerate(PROMPTS):
            take = waiting[row][:5 + place]
            if step >= 2 * place and (take or len(ids[row]) < 12):
                chunks.append((row, take or ids[row][-1:]))
                waiting[row] = waiting[row][len(take):]
        for (row, _), logits in zip(chunks, run.forward(*chunks) if chunks else (), strict=True):
            if not waiting[row]:
                ids[row].append(int(logits.argmax()))
    assert ids == expected


@pytest.mark.parametrize("kind", KINDS)
def test_recomputing_generated_tokens_gives_the_same_bits(kind: str) -> None:
    """A row whose pages were lost goes on with the same logits after its tokens were prefilled again."""
    model = make(kind)
    ids, logits = alone(model, PROMPTS["c"], 20)
    run = PagedRun(model, KERNELS)
    greedy(run, "lost", PROMPTS["c"], 20)
    kept = run.forward(("lost", ids[-1:]))
    again = run.forward(("again", [*PROMPTS["c"], *ids]))
    assert torch.equal(kept, again)
    assert torch.equal(again[0], logits[-1])


def spoil_page(run: PagedRun, row: str) -> None:
    """Another token in one place of the row's second page (or its slot)."""
    (pages,) = run.tables[row].values()
    for layer in run.caches:
        for cache in layer.values():
            cache[pages[min(1, len(pages) - 1)]].view(-1)[0] += 1


def lose_page(run: PagedRun, row: str) -> None:
    """The row's first visible page (or its slot) was cleared."""
    (pages,) = run.tables[row].values()
    for layer in run.caches:
        for cache in layer.values():
            cache[next(page for page in pages if page)] = 0


def swap_pages(run: PagedRun, row: str) -> None:
    """Two visible pages of the row changed places; the slot is another row's."""
    (pages,) = run.tables[row].values()
    if len(pages) == 1:
        (pages[0],) = next(iter(run.tables["other"].values()))
    else:
        pages[-1], pages[-2] = pages[-2], pages[-1]


@pytest.mark.parametrize("fault", [spoil_page, lose_page, swap_pages])
@pytest.mark.parametrize("kind", ["paged", "windowed", "state"])
def test_a_fault_of_the_cache_changes_the_answer(kind: str, fault: Callable[[PagedRun, str], None]) -> None:
    """One wrong entry, a lost page or a foreign page shows in the next logits of a fake model."""
    model, prompt = fake(kind), PROMPTS["c"][:14]
    run = PagedRun(model, KERNELS)
    run.forward(("x", prompt), ("other", PROMPTS["c"]))
    fault(run, "x")
    assert not torch.equal(run.forward(("x", [65])), alone(model, [*prompt, 65])[1][-1:])


def test_a_state_shows_a_repeated_token() -> None:
    """A `state` row that takes a token in twice answers otherwise, although the token's position is the same."""
    model = fake("state")
    run = PagedRun(model, KERNELS)
    run.forward(("x", PROMPTS["b"]))
    expected = run.forward(("x", [65]))
    run.length["x"] -= 1
    assert not torch.equal(run.forward(("x", [65])), expected)


@pytest.mark.parametrize("kind", ["paged", "windowed", "state"])
def test_answers_are_readable_and_end_by_content(kind: str) -> None:
    """Greedy ids are printable ASCII or the EOS, whose rate the config chooses; 0 means never."""
    lengths = []
    for start in range(40):
        ids, _ = alone(fake(kind, eos_every=16, eos_token_ids=(0,)), [start, 50], 40)
        lengths.append(ids.index(0) if 0 in ids else 40)
        assert all(i in PRINTABLE or i == 0 for i in ids)
    assert len(set(lengths)) > 8
    assert 8 < sum(lengths) / len(lengths) < 24  # one in 16, cut at 40: 15 on average
    ids, _ = alone(fake(kind, eos_every=0, eos_token_ids=(0,)), [1, 2], 60)
    assert 0 not in ids
    assert len(set(ids)) > 20
