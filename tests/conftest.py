"""What all tests share: the demo model, torch's thread count, property tests that draw the same examples each time.

`make test` runs the files in two processes (pytest-xdist): what is slow comes first, so that both end together.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from batchgen_beam.transforms.model_store import resolve_model

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_GGUF = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"

SLOWEST = (
    "faults/test_kills.py", "determinism/test_law.py", "models/test_native_parity.py",
    "determinism/test_streamed_law.py", "faults/test_processes.py", "engine/test_partition.py", "faults/test_poison.py",
    "kernels/test_native_set.py", "pipelines/test_models_elsewhere.py", "determinism/test_sparse_law.py",
)
"""The files that take longest, half a minute or more, the slowest first."""

FOLDER = "BATCHGEN_TEST_CACHE"
"""The environment's word for the folder of the converted demo model, which both processes use."""

torch.set_num_threads(1)

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")


def gguf_path() -> Path:
    """Where the demo model is expected."""
    return Path(os.environ.get("BATCHGEN_TEST_GGUF", DEFAULT_GGUF)).absolute()


def pytest_configure(config: pytest.Config) -> None:
    """Name the demo model's folder, once for all processes of a session."""
    if not hasattr(config, "workerinput"):
        os.environ[FOLDER] = str(ROOT / ".cache" / f"tests-{uuid.uuid4().hex}")


def pytest_unconfigure(config: pytest.Config) -> None:
    """Take the folder away, if a test has made it."""
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(FOLDER), ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of what was not fetched are skipped, with the remedy: the demo model, the Airflow environment."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: next((place for place, name in enumerate(SLOWEST)
                                          if item.path.match(f"tests/{name}")), len(SLOWEST)))
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
    """An engine fixes torch's thread count for its whole process: after each test it is what it was before."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The demo model's GGUF file; for tests marked `smollm2`."""
    return gguf_path()


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_gguf: Path) -> Path:
    """The demo model's folder, converted once in each session, so that it is never an older converter's work.

    Its parent serves as `--model-cache`.
    """
    return resolve_model(str(smollm2_gguf), Path(os.environ[FOLDER]))
