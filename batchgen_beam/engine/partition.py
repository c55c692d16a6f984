"""PARTITION: one engine over several processes, each with its columns, heads and parts of experts of the model.

Owns the roles.  The first process leads: it has the engine, and tells the others what its executor is told.  They
follow: the same executor over their own part of the model and of the caches, without an engine.  So all make the same
calls, and meet inside the kernel set.  Decides nothing: whether a tail is split is `tail_rule`'s question.  Does not
know how a kernel set deals its work, how processes meet, or what a row is.

Commands are pickled: they travel between the processes of one run alone.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from batchgen_beam.engine.batch import PackedBatch
from batchgen_beam.engine.budget import PageBudget, page_budget
from batchgen_beam.engine.executor import Executor, MakeExecutor
from batchgen_beam.engine.kv_pool import PageCopy
from batchgen_beam.engine.primitives import SubBatching
from batchgen_beam.models.caches import GroupKey
from batchgen_beam.models.interface import KernelSet, Model, Scores
from batchgen_beam.settings import EngineSettings

__all__ = ["Receiving", "Sending", "follow", "leading"]

_END = pickle.dumps(None)
_COMMANDS: dict[str, Callable[..., Any]] = {"clear": Executor.clear, "copy": Executor.copy,
                                            "forward": Executor.forward}


class Sending(Protocol):
    """The first process's way to the others."""

    def meet(self) -> None:
        """Wait until all processes are here."""

    def send(self, message: bytes) -> None:
        """To all of them."""


class Receiving(Protocol):
    """Another process's way from the first."""

    def meet(self) -> None:
        """Wait until all processes are here."""

    def receive(self) -> bytes:
        """The next message."""


@contextmanager
def leading(model: Model, kernels: KernelSet, settings: EngineSettings, others: Sending) -> Iterator[MakeExecutor]:
    """For engines of this model and these settings: an executor whose commands every process carries out.

    All engines get the same one and take turns, each left without rows; the others' work ends with this context.
    `kv_memory` is that of all processes together: each keeps its heads of every page.
    """
    executor = _LeadingExecutor(others, model, kernels, page_budget(model, settings), SubBatching.of(settings))
    others.meet()
    yield lambda *_: executor
    others.send(_END)


def follow(model: Model, kernels: KernelSet, settings: EngineSettings, leader: Receiving) -> None:
    """Carry out the leader's commands until it ends; its engine has the same model and settings."""
    executor = Executor(model, kernels, page_budget(model, settings), SubBatching.of(settings))
    leader.meet()
    while (command := pickle.loads(leader.receive())) is not None:
        name, arguments, named = command
        _COMMANDS[name](executor, *arguments, **named)


class _LeadingExecutor(Executor):
    """An executor that tells the others everything before it does it."""

    def __init__(self, others: Sending, model: Model, kernels: KernelSet, budget: PageBudget,
                 sub_batching: SubBatching) -> None:
        super().__init__(model, kernels, budget, sub_batching)
        self._others = others

    def clear(self, group: GroupKey, pages: Sequence[int]) -> None:
        """Everywhere."""
        self._tell("clear", group, list(pages))
        super().clear(group, pages)

    def copy(self, copies: Iterable[PageCopy], *, to_host: bool) -> None:
        """Everywhere."""
        moves = list(copies)
        self._tell("copy", moves, to_host=to_host)
        super().copy(moves, to_host=to_host)

    def forward(self, batch: PackedBatch, whole_W: NDArray[np.bool_], eligible: int) -> Scores:
        """Everywhere; all processes come to the same scores."""
        self._tell("forward", batch, whole_W, eligible)
        return super().forward(batch, whole_W, eligible)

    def _tell(self, name: str, *arguments: object, **named: object) -> None:
        self._others.send(pickle.dumps((name, arguments, named)))
