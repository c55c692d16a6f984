"""The laws of bits hold for torch's kernels as they run by default on two cores: these tests have two threads."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def two_threads(torch_threads: None) -> None:
    """Torch chooses kernels by the number of threads too."""
    torch.set_num_threads(2)
