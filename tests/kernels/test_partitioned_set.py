"""The law of PARTITION: dealt over processes and gathered, every result has the bits of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen_beam.kernels.partitioned_set import Columns, PartitionedKernels, deal
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.models.interface import (
    Activation,
    CacheKind,
    CacheSpec,
    Expert,
    KernelSet,
    Routing,
    Scores,
)
from batchgen_beam.weights.loader import load_model
from tests.kernels.partitions import in_partition
from tests.kernels.sets import HIGHEST, NEEDS_NATIVE, native
from tests.kernels.views import view
from tests.models import tiny_llama
from tests.models.paged import PagedRun
from tests.models.tiny import TINIES, make_reference

LARGER = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 160}
"""So that every product can be dealt over three processes."""

PROMPT = [(5 * i * i + 3 * i + 1) % 320 for i in range(30)]
DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(("count", "size", "unit", "borders"), [
    (96, 2, 32, [0, 32, 96]), (100, 3, 32, [0, 32, 64, 100]), (64, 3, 32, []), (33, 2, 32, [0, 32, 33]),
    (3, 2, 1, [0, 1, 3]), (1, 2, 1, []), (8, 4, 1, [0, 2, 4, 6, 8]),
])
def test_deal(count: int, size: int, unit: int, borders: list[int]) -> None:
    """Ranges that are multiples of the unit but for the last, or none if one would be empty."""
    assert deal(count, size, unit) == borders


def test_deals_are_even_and_complete() -> None:
    """All is dealt, nothing twice, and no range has over a unit more than another (but for the ragged end)."""
    for count in range(1, 200):
        for size in (2, 3, 5):
            ranges = [stop - start for start, stop in pairwise(deal(count, size, 16))]
            assert not ranges or (sum(ranges) == count and len(ranges) == size and min(ranges) > 0)
            assert not ranges or max(ranges[:-1]) - min(ranges[:-1]) <= 16


def expert_case(kernels: KernelSet, sizes: tuple[int, int]) -> Tensor:
    """A layer of experts beside a shared result, on fixed random numbers."""
    generator = torch.Generator().manual_seed(5)
    width, inner = sizes

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(kernels.dtype)

    experts = [Expert(gate_up=kernels.pack([draw(inner, width), draw(inner, width)], biases=[draw(inner), draw(inner)]),
                      down=kernels.pack([draw(width, inner)], biases=[draw(width)])) for _ in range(5)]
    routing = Routing(ids_Tk=torch.rand(40, 5, generator=generator).argsort(1)[:, :2],
                      weights_Tk=torch.rand(40, 2, generator=generator))
    return kernels.experts(draw(40, width), routing, experts, Activation(alpha=1.7, limit=2.0, shift=1.0),
                           shared_TD=draw(40, width))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(128, 96), (192, 160), (40, 96), (96, 40), (40, 40)])
def test_experts(tmp_path: Path, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    """Whatever of an expert's two products is large enough to be dealt, over two processes and over three."""
    expected = expert_case(TorchKernels(dtype), sizes)
    for size in (2, 3):
        for found in in_partition(tmp_path / str(size), size,
                                  lambda group: expert_case(PartitionedKernels(TorchKernels(dtype), group), sizes)):
            assert torch.equal(found, expected)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints by family, made once each."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp("tiny") / "model"
            if family == "llama":
                made[family] = tiny_llama.make_reference(tiny_llama.Tiny(keys=LARGER), folder).folder
            else:
                keys = {**TINIES[family].keys, **LARGER, **({"num_key_value_heads": 8} if "deepseek" in family else {})}
                made[family] = make_reference(replace(TINIES[family], keys=keys), folder).folder
        return made[family]

    return get


def logits(folder: Path, kernels: KernelSet) -> Tensor:
    """Of a prompt in company, of tokens decoded after it, and of a prompt that goes on over a page's end."""
    page = 64 if kernels.name == "native" else 8
    run = PagedRun(load_model(folder, kernels), kernels, page_tokens=page)
    parts = [run.forward(("x", PROMPT), ("y", PROMPT[:3]), every=True), run.forward(("y", [4]), ("x", [5])),
             run.forward(("x", PROMPT * 2), every=True)]
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_whole_models_on_the_torch_set(family: str, dtype: torch.dtype, tmp_path: Path,
                                       folders: Callable[[str], Path]) -> None:
    """Logits over two processes and over three (uneven heads and columns) have the bits of one process, everywhere."""
    expected = logits(folders(family), TorchKernels(dtype))
    for size in (2, 3):
        for found in in_partition(tmp_path / str(size), size, lambda group: logits(
                folders(family), PartitionedKernels(TorchKernels(dtype), group))):
            assert torch.equal(found, expected)


@NEEDS_NATIVE
@pytest.mark.parametrize("dtype", DTYPES)
def test_llama_on_the_native_set(dtype: torch.dtype, tmp_path: Path, folders: Callable[[str], Path]) -> None:
    """Logits over two processes have the bits of one process's fused pass."""
    expected = logits(folders("llama"), native(dtype, HIGHEST[dtype]))
    for found in in_partition(tmp_path / "p", 2, lambda group: logits(
            folders("llama"), PartitionedKernels(native(dtype, HIGHEST[dtype]), group))):
        assert torch.equal(found, expected)


@NEEDS_NATIVE
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_on_the_native_set(dtype: torch.dtype, tmp_path: Path) -> None:
    """Rows that need no logits get the native set's own log-probability of the greatest, which has another order of
    sums than logits have; the others get their logits."""
    generator = torch.Generator().manual_seed(9)
    x_WD, weight_VD = torch.randn(64, 96, generator=generator).to(dtype), torch.randn(700, 96, generator=generator)
    one = CacheSpec(name="k", kind=CacheKind.PAGED, shape=(1, 16), dtype=dtype)
    batch = view([range(1)] * 64, torch.zeros(64, 1, dtype=torch.int64), one.group)
    batch = replace(batch, whole_W=np.arange(64) % 3 == 0, eligible=650)

    def work(kernels: KernelSet) -> Scores:
        return kernels.scores(x_WD, kernels.pack_head(weight_VD), batch)

    inner = native(dtype, HIGHEST[dtype])
    expected = work(inner)
    for found in in_partition(tmp_path / "p", 2, lambda group: work(PartitionedKernels(
            native(dtype, HIGHEST[dtype]), group))):
        assert torch.equal(found.logits_LV, expected.logits_LV)
        assert found.line_W.tolist() == expected.line_W.tolist()
        needless = found.line_W < 0
        assert found.ids_W[needless].tolist() == expected.ids_W[needless].tolist()
        assert found.logprobs_W[needless].tobytes() == expected.logprobs_W[needless].tobytes()


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_each_process_has_its_part_alone(family: str, tmp_path: Path, folders: Callable[[str], Path]) -> None:
    """Of two processes each keeps two of four key/value heads, and half of every product's columns."""
    def work(group: object) -> tuple[list[int], list[Columns]]:
        kernels = PartitionedKernels(TorchKernels(torch.float32), group)  # type: ignore[arg-type]
        model = load_model(folders(family), kernels)
        layer = model.layers[0]
        packed = [layer.mix.qkv, layer.mix.out, model._head]  # type: ignore[attr-defined]
        packed += ([layer.expand.gate_up, layer.expand.down] if family == "llama" else  # type: ignore[attr-defined]
                   [part for expert in layer.expand.experts  # type: ignore[attr-defined]
                    for part in (expert.gate_up, expert.down)])
        caches = [kernels.allocate(spec, 2, 8).shape[1] for spec in layer.cache_spec()]
        return caches, packed

    for caches, packed in in_partition(tmp_path / "p", 2, work):
        assert caches == [2, 2]
        for weight in packed:
            assert isinstance(weight, Columns)
            one, other = weight.totals
            assert abs(one - other) <= 32 * len(weight.widths[0])


@NEEDS_NATIVE
def test_experts_need_the_torch_set(tmp_path: Path) -> None:
    """The native set adds experts up by itself: dealt, they are refused by name."""
    def work(group: object) -> None:
        kernels = PartitionedKernels(native(torch.float32, HIGHEST[torch.float32]), group)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"on the torch kernel set, not on 'native'; use --kernels=torch"):
            expert_case(kernels, (128, 96))

    in_partition(tmp_path / "p", 2, work)
