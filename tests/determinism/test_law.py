"""A row's ids, finish reason and float32 log-probability bits do not depend on anything but the row."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.determinism.law import Law
from tests.determinism.models import GGUF, smollm2_law, tiny_law

CHUNKS = (1, 7, 64, 100, 0)
BATCHES = (2, 7, 32)
SLOW = pytest.mark.timeout(1200)
NEEDS_GGUF = pytest.mark.skipif(not GGUF.exists(), reason=f"{GGUF} is absent; `make test` fetches it")


def hold(law: Law, *, alone: list[str] | None, pages: int, host_pages: int) -> None:
    """Compare every disturbance with the rows alone, and with all rows at once where only some ran alone."""
    reference = law.batched(len(law.prompts))
    for name, bits in law.alone(alone).items():
        assert reference[name] == bits, f"{name} alone"
    for name, run in law.disturbances(CHUNKS, BATCHES).items():
        assert run() == reference, name
    churned, churn = law.churned(every=2, host_pages=host_pages, pages=pages)
    count = len(law.prompts)
    assert all(churn.holds.get(i, 0) >= 2 for i in range(count)), churn.holds
    assert all(churn.evictions.get(i, 0) >= 2 for i in range(1, count)), churn.evictions
    assert 0 not in churn.evictions
    assert churned == reference, "held and evicted"


@SLOW
def test_tiny_llama_short() -> None:
    """Eight rows of a tiny float32 Llama, one of them long: the same bits under every disturbance."""
    hold(tiny_law(8, longest=300, new_tokens=70), alone=None, pages=30, host_pages=20)


@SLOW
def test_rebuilt_after_every_event() -> None:
    """Rows of a float32 Llama, rebuilt from their records in a fresh engine after each event: the same bits."""
    law = tiny_law(3, longest=300, new_tokens=80)
    reference = law.alone()
    runs = law.resumed_after_each_event(3)
    assert len(runs) > 6
    assert all(bits == reference for bits in runs)


@SLOW
@pytest.mark.smollm2
@NEEDS_GGUF
def test_smollm2_short() -> None:
    """Four rows of SmolLM2 in bfloat16: the same bits alone, in pairs, in small chunks, held and evicted."""
    law = smollm2_law(4, longest=100, new_tokens=20)
    reference = law.batched(4)
    assert law.alone() == reference
    assert law.batched(2, chunk=7, seed=3) == reference


@SLOW
@pytest.mark.parametrize("make", [tiny_law, pytest.param(smollm2_law, marks=[pytest.mark.smollm2, NEEDS_GGUF])])
def test_untiled_products_break_the_law(make: Callable[..., Law]) -> None:
    """The comparison can fail: with plain, untiled products a row's bits depend on its company."""
    law = make(6, longest=60, new_tokens=12, tile_rows=None)
    assert law.alone() != law.batched(6)


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_tiny_llama_long() -> None:
    """32 rows, at least 256 new tokens, contexts beyond 1,024, float32."""
    hold(tiny_law(32, longest=1100, new_tokens=256), alone=None, pages=60, host_pages=40)


@pytest.mark.long
@pytest.mark.smollm2
@NEEDS_GGUF
@pytest.mark.timeout(7200)
def test_smollm2_long() -> None:
    """32 rows, at least 256 new tokens, contexts beyond 1,024, bfloat16."""
    hold(smollm2_law(32, longest=1100, new_tokens=256), alone=None, pages=60, host_pages=40)
