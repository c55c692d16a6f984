"""A row's ids, finish reason and float32 log-probability bits do not depend on anything but the row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen_beam.config.model_registry import load_config
from batchgen_beam.kernels.native_set import NativeKernels
from batchgen_beam.kernels.self_test import ModelShapes, check_invariance
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.records import FinishReason
from batchgen_beam.transforms.model_shapes import model_shapes
from tests.determinism.law import Law
from tests.determinism.models import TINY, native_kernels, smollm2_law, tiny_law
from tests.engine import rigs
from tests.kernels.sets import NEEDS_NATIVE

CHUNKS = (1, 7, 64, 100, 0)
BATCHES = (2, 7, 32)
SLOW = pytest.mark.timeout(1200)
SETS = pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=NEEDS_NATIVE)])


def tiny(kernels: str, count: int, **sizes: Any) -> Law:
    """The tiny Llama on one of the sets."""
    return tiny_law(count, kernels=native_kernels(torch.float32) if kernels == "native" else None, **sizes)


def smollm2(kernels: str, folder: Path, count: int, **sizes: Any) -> Law:
    """SmolLM2 on one of the sets."""
    return smollm2_law(folder, count, kernels=native_kernels(torch.bfloat16) if kernels == "native" else None, **sizes)


def hold(law: Law, *, alone: list[str] | None = None) -> None:
    """Compare every disturbance with the rows alone (or those named)."""
    reference = law.batched(len(law.prompts))
    for name, bits in law.alone(alone).items():
        assert reference[name] == bits, f"{name} alone"
    for name, run in law.disturbances(CHUNKS, BATCHES).items():
        assert run() == reference, name


def hold_churned(law: Law, *, pages: int, host_pages: int) -> None:
    """Compare with a pool so small that every row is held and evicted at least twice; the oldest is only held."""
    reference = law.batched(len(law.prompts))
    for sharing in (True, False):
        churned, churn = law.churned(every=2, host_pages=host_pages, pages=pages, sharing=sharing)
        count = len(law.prompts)
        assert all(churn.holds.get(i, 0) >= 2 for i in range(count)), churn.holds
        assert all(churn.evictions.get(i, 0) >= 2 for i in range(1, count)), churn.evictions
        assert 0 not in churn.evictions
        assert churned == reference, f"sharing {sharing}"


@SETS
@SLOW
def test_tiny_llama_short(kernels: str) -> None:
    """Eight rows of a tiny float32 Llama, one of them long, some ended by an EOS: the same bits however disturbed."""
    law = tiny(kernels, 8, longest=300, new_tokens=70, eos_ids=frozenset({7, 77, 177}))
    reasons = {bits[1] for bits in law.batched(8).values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    hold(law)


@SETS
@SLOW
def test_tiny_llama_held_and_evicted(kernels: str) -> None:
    """Eight rows, each held twice and all but the oldest evicted twice: the same bits."""
    hold_churned(tiny(kernels, 8, longest=300, new_tokens=70), pages=30, host_pages=20)


@SETS
@SLOW
def test_rebuilt_after_every_event(kernels: str) -> None:
    """Rows of a float32 Llama, rebuilt from their records in a fresh engine after each event: the same bits."""
    law = tiny(kernels, 3, longest=300, new_tokens=80)
    reference = law.alone()
    runs = law.resumed_after_each_event(3)
    assert len(runs) > 6
    assert all(bits == reference for bits in runs)


def tiny_int8(kernels: str, *, threads: int = 2) -> Law:
    """Six rows of the tiny Llama, one of them long, with keys and values kept as int8."""
    found = (TorchKernels(torch.float32, kv_dtype=torch.int8) if kernels == "torch" else
             native_kernels(torch.float32, threads=threads, kv_dtype=torch.int8))
    return tiny_law(6, longest=200, new_tokens=70, kernels=found)


@SETS
@SLOW
def test_tiny_llama_with_int8_pages(kernels: str) -> None:
    """Rows whose keys and values are kept as int8: the same bits alone, batched, in chunks, shuffled and in lanes."""
    hold(tiny_int8(kernels))


@SETS
@SLOW
def test_tiny_llama_with_int8_pages_held_and_evicted(kernels: str) -> None:
    """Pages of int8 go to the host tier and back, are computed anew and shared, and change no bit."""
    hold_churned(tiny_int8(kernels), pages=24, host_pages=16)


@NEEDS_NATIVE
@SLOW
def test_int8_pages_on_any_number_of_threads() -> None:
    """One thread, two, three: the same bits, which are not those of rows kept in float32."""
    reference = tiny_int8("native", threads=1).batched(6)
    for threads in (2, 3):
        assert tiny_int8("native", threads=threads).batched(6) == reference
    assert tiny("native", 6, longest=200, new_tokens=70).batched(6) != reference


@SETS
@SLOW
@pytest.mark.smollm2
def test_smollm2_short(kernels: str, smollm2_folder: Path) -> None:
    """Four rows of SmolLM2 in bfloat16: the same bits alone, together, and shuffled in pairs and small chunks."""
    law = smollm2(kernels, smollm2_folder, 4, longest=100, new_tokens=20)
    reference = law.batched(4)
    assert law.alone() == reference
    assert law.batched(2, chunk=7, seed=3) == reference


def break_the_law(law: Law, shapes: ModelShapes) -> None:
    """Demand that company changes bits; skip where this torch's plain products happen not to know their company."""
    if check_invariance(law.kernels, shapes, longest=64).deterministic:
        pytest.skip("untiled products of these shapes have the same bits in every batch with this torch and processor")
    assert law.alone() != law.batched(len(law.prompts))


@SLOW
def test_untiled_products_break_the_law_of_the_tiny_llama() -> None:
    """The comparison can fail: with plain, untiled float32 products a row's bits depend on its company."""
    untiled = TorchKernels(torch.float32, tile_rows=None)
    break_the_law(tiny_law(6, longest=60, new_tokens=12, kernels=untiled), model_shapes(TINY))


@SLOW
@pytest.mark.smollm2
def test_untiled_products_break_the_law_of_smollm2(smollm2_folder: Path) -> None:
    """The comparison can fail: with plain, untiled bfloat16 products a row's bits depend on its company."""
    untiled = TorchKernels(torch.bfloat16, tile_rows=None)
    break_the_law(smollm2_law(smollm2_folder, 6, longest=60, new_tokens=12, kernels=untiled),
                  model_shapes(load_config(str(smollm2_folder))))


@SETS
@pytest.mark.long
@pytest.mark.timeout(3000)
def test_tiny_llama_long(kernels: str) -> None:
    """32 rows, at least 256 new tokens, contexts beyond 1,024, float32."""
    law = tiny(kernels, 32, longest=1100, new_tokens=256)
    hold(law)
    hold_churned(law, pages=60, host_pages=40)


@SETS
@pytest.mark.long
@pytest.mark.smollm2
@pytest.mark.timeout(7200)
def test_smollm2_long(kernels: str, smollm2_folder: Path) -> None:
    """32 rows, at least 256 new tokens, contexts beyond 1,024, bfloat16."""
    law = smollm2(kernels, smollm2_folder, 32, longest=1100, new_tokens=256)
    hold(law)
    hold_churned(law, pages=60, host_pages=40)


@NEEDS_NATIVE
@pytest.mark.long
@pytest.mark.smollm2
@pytest.mark.timeout(3000)
def test_smollm2_256_rows(smollm2_folder: Path) -> None:
    """256 rows on the native set: alone, batched, shuffled, held and evicted, without sharing, on one thread."""
    law = smollm2("native", smollm2_folder, 256, longest=300, new_tokens=24)
    reference = law.batched(256)
    assert law.alone() == reference
    assert law.batched(256, seed=11) == reference
    assert law.batched(100, chunk=7, seed=12) == reference
    for sharing in (True, False):
        whole = rigs.said(rigs.run(law.engine(prefix_sharing=sharing), law.prompts))
        assert whole == reference, f"sharing {sharing}"
        churned, churn = law.churned(every=2, host_pages=100, pages=150, sharing=sharing)
        assert churned == reference, f"held and evicted, sharing {sharing}"
        assert len(churn.evictions) > 50
        assert len(churn.holds) > 50
    assert isinstance(law.kernels, NativeKernels)
    law.kernels.threads = 1
    assert law.batched(256, seed=13) == reference
