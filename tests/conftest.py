"""What all tests share: the demo model, torch's thread count, property tests that draw the same examples each time."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from batchgen_beam.transforms.model_store import resolve_model

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_GGUF = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
THREADS = torch.get_num_threads()

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


def gguf_path() -> Path:
    """Where the demo model is expected."""
    return Path(os.environ.get("BATCHGEN_TEST_GGUF", DEFAULT_GGUF)).absolute()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of what was not fetched are skipped, with the remedy: the demo model, the Airflow environment."""
    missing = {}
    if not gguf_path().is_file():
        missing["smollm2"] = pytest.mark.skip(reason=f"no demo model at {gguf_path()}: run `make model`")
    if "BATCHGEN_AIRFLOW_PYTHON" not in os.environ:
        missing["airflow"] = pytest.mark.skip(reason="no Airflow environment: run `make test-airflow`")
    for item in items:
        for mark, skip in missing.items():
            if item.get_closest_marker(mark):
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def torch_threads() -> Iterator[None]:
    """An engine fixes torch's thread count for its whole process: after each test it is what it was at the start."""
    yield
    torch.set_num_threads(THREADS)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The demo model's GGUF file; for tests marked `smollm2`."""
    return gguf_path()


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_gguf: Path) -> Iterator[Path]:
    """The demo model's folder, converted once in each session, so that it is never an older converter's work.

    Its parent serves as `--model-cache`.
    """
    (ROOT / ".cache").mkdir(exist_ok=True)
    cache = Path(tempfile.mkdtemp(prefix="tests-", dir=ROOT / ".cache"))
    try:
        yield resolve_model(str(smollm2_gguf), cache)
    finally:
        shutil.rmtree(cache)
