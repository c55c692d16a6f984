"""Experts for the native library, as the structs that it reads, and the sorted assignments that go with them.

Experts in a list or a tuple are in memory together and go to the library in one call; of any other sequence what was
looked up is valid until the next look-up, so each goes alone.  The sums are the same: expert by expert in ascending id.
Does not know routers, layers or threads.

Shape suffixes: T tokens, k experts of a token, A = T * k assignments, E experts, P experts with tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from batchgen_beam.kernels import native_library as native
from batchgen_beam.kernels.expert_batches import sorted_assignments
from batchgen_beam.models.experts import Activation, Expert, Routing

__all__ = ["add_experts"]


def add_experts(routing: Routing, experts: Sequence[Expert], activation: Activation,
                run: Callable[[native.Experts], object]) -> None:
    """Call `run` with all experts that some token goes to, once or several times, the lowest ids first."""
    tokens_A, weights_A, counts_E = sorted_assignments(routing, len(experts))
    assert weights_A.dtype is torch.float32, weights_A.dtype
    present_P = counts_E.nonzero().flatten()
    together = isinstance(experts, list | tuple)
    for part_P in (present_P,) if together else present_P.split(1):
        if not len(part_P):
            continue
        begin = int(counts_E[:int(part_P[0])].sum())
        structs = (native.Expert * len(part_P))(*(_struct(experts[e]) for e in part_P.tolist()))
        ends_P = counts_E[part_P].cumsum(0)
        run(native.Experts(structs, ends_P.data_ptr(), len(part_P), tokens_A[begin:].data_ptr(),
                           weights_A[begin:].data_ptr(), activation.alpha,
                           math.inf if activation.limit is None else activation.limit, activation.shift))


def _struct(expert: Expert) -> native.Expert:
    gate, up = expert.gate_up.parts
    return native.Expert(gate, up, expert.down.parts[0])
