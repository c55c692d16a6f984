"""Parity with transformers: its own answers, and how far ours are from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.weights.loader import load_model
from tests.models.paged import PagedRun

TOLERANCE = 1e-4
"""Both sides sum in float32 in different orders: about 1e-5 on logits of size 5; a wrong mechanism is over 1e-3."""

VISIBLE = 1e-3
LEAST_MARGIN = 0.004
"""Best minus second logit at every greedy step: 40 times the tolerance, so that equal tokens are no luck."""

KERNELS = TorchKernels(torch.float32)


class Reference(Protocol):
    """A checkpoint, prompts, and for each prompt the logits of all its tokens."""

    @property
    def folder(self) -> Path: ...

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]: ...

    @property
    def logits(self) -> tuple[Tensor, ...]: ...


@torch.no_grad()
def their_logits(model: Any, ids: tuple[int, ...]) -> Tensor:
    """What transformers computes, for every token."""
    found: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return found


def their_greedy(model: Any, prompts: Sequence[tuple[int, ...]], count: int) -> tuple[tuple[int, ...], ...] | None:
    """The next `count` tokens of each prompt; None as soon as one of them is no clear choice."""
    found = []
    for prompt in prompts:
        ids = prompt
        while len(ids) < len(prompt) + count:
            best = their_logits(model, ids)[-1].topk(2)
            if best.values[0] - best.values[1] < LEAST_MARGIN:
                return None
            ids = (*ids, int(best.indices[0]))
        found.append(ids[len(prompt):])
    return tuple(found)


def largest_difference(folder: Path, reference: Reference) -> float:
    """Of the checkpoint in `folder`, over all tokens of all prompts."""
    model = load_model(folder, KERNELS)
    return max(float((PagedRun(model, KERNELS).forward(("x", prompt), every=True) - logits).abs().max())
               for prompt, logits in zip(reference.prompts, reference.logits, strict=True))


def neutralise(reference: Reference, stored: dict[str, Tensor], part: str, folder: Path) -> None:
    """The checkpoint again in `folder`, where norms whose names end with `part` are 1, and other weights 0."""
    assert any(name.endswith(part) for name in stored)
    (folder / "config.json").symlink_to(reference.folder / "config.json")
    neutral = torch.ones_like if "norm" in part else torch.zeros_like
    save_file({name: neutral(tensor) if name.endswith(part) else tensor for name, tensor in stored.items()},
              folder / "model.safetensors")
