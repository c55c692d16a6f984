"""What all tests share: the demo model's path, and property tests that draw the same examples every time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_GGUF = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


def gguf_path() -> Path:
    """Where the demo model is expected."""
    return Path(os.environ.get("BATCHGEN_TEST_GGUF", DEFAULT_GGUF))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the demo model are skipped, with the remedy, where it was not fetched."""
    if gguf_path().is_file():
        return
    skip = pytest.mark.skip(reason=f"no demo model at {gguf_path()}: run `make model`")
    for item in items:
        if item.get_closest_marker("smollm2"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The demo model's GGUF file; for tests marked `smollm2`."""
    return gguf_path()
