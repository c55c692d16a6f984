"""The command with a kernel set that ends its process when it meets one token id.

    python -m tests.faults.abort_kernel run --input=...

Nothing else differs from the command: the choice of kernels is given another class before it starts.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from batchgen_beam.kernels import choice
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.pipelines.main import main

DEADLY = "§"
DEADLY_ID = DEADLY.encode()[-1]
"""A byte that stands in the prompts with this letter only: the fake model's ids are bytes, its answers are ASCII."""


class AbortingKernels(TorchKernels):
    """As a kernel that reads beyond its memory: the whole process is gone at once."""

    def append(self, cache: Any, values_T: Any, spec: Any, view: Any) -> None:
        if (view.token_ids_T == DEADLY_ID).any():
            os.abort()
        super().append(cache, values_T, spec, view)


if __name__ == "__main__":
    choice.TorchKernels = AbortingKernels
    sys.exit(main())
