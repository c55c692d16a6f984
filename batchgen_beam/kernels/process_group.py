"""Several processes of one machine that compute together: gathered tensors, messages from the first, and how they end.

Owns the connections (torch.distributed's gloo over the loopback device, met through a file) and the promise that a
process which ends, however it does, ends the wait of all others with an error that names it.  Does not know what is
gathered, or models.

Shape suffixes: T tokens, W columns of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, distributed
from torch.distributed import distributed_c10d

from batchgen_beam.errors import EngineError

__all__ = ["Gathering", "MeetingPlace", "ProcessGroup"]

_STORES: Any = distributed
_GROUPS: Any = distributed_c10d
"""torch's stubs leave out some of these classes, and their options and operations."""

_STORE = "processes"
_LENGTH_BYTES = 8


class Gathering(Protocol):
    """One process's view of all of them: `rank` of `size`."""

    rank: int
    size: int

    def gather(self, own_TW: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """What every process gave, `[T, widths[rank]]` each, in order of rank; all call it together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingPlace:
    """Where `size` processes find each other: an empty folder of their own.

    A process that has not come, or not loaded its part, within `join` seconds of another is lost, and so is one that
    gives no answer within `answer` seconds.
    """

    folder: Path
    size: int
    join: float
    answer: float


class ProcessGroup:
    """The connections of one process.  A context: left by an error, it leaves word of it to the others."""

    def __init__(self, place: MeetingPlace, rank: int) -> None:
        """Waits for all processes; `EngineError` if one does not come."""
        self.rank, self.size = rank, place.size
        self._place = place
        self._lost = False
        self._store = _STORES.FileStore(str(place.folder / _STORE), place.size)
        options = _GROUPS.ProcessGroupGloo._Options()
        options._devices = [_GROUPS.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=place.join)
        try:
            self._group = _GROUPS.ProcessGroupGloo(self._store, rank, place.size, options)
        except RuntimeError as error:
            raise self._loss(error, place.join) from error
        self.meet()  # one that left before all others are connected would end their connecting

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is not None and not self._lost:
            self._store.set(self._word(self.rank), f"{kind.__name__}: {error}")
        self._group = None

    def gather(self, own_TW: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """What every process gave; bytes as they are, so any number format."""
        tokens, item = len(own_TW), own_TW.element_size()
        assert own_TW.shape == (tokens, widths[self.rank]), (own_TW.shape, widths)
        own = torch.zeros(tokens * max(widths) * item, dtype=torch.uint8)
        own[: own_TW.numel() * item] = own_TW.contiguous().view(-1).view(torch.uint8)
        found = self._gather(own, self._place.answer)
        return [part[: tokens * width * item].view(own_TW.dtype).view(tokens, width)
                for part, width in zip(found, widths, strict=True)]

    def meet(self) -> None:
        """Wait until all processes are here."""
        self._gather(torch.zeros(1, dtype=torch.uint8), self._place.join)

    def _gather(self, own: Tensor, seconds: float) -> list[Tensor]:
        """Bytes, equally many of each process."""
        options, found = _GROUPS.AllgatherOptions(), [torch.empty_like(own) for _ in range(self.size)]
        options.timeout = timedelta(seconds=seconds)
        try:
            self._open.allgather([found], [own], options).wait()
        except RuntimeError as error:
            raise self._loss(error, seconds) from error
        return found

    def send(self, message: bytes) -> None:
        """From the first process to all others, each of which calls `receive`."""
        assert self.rank == 0
        self._broadcast(torch.tensor([len(message)]).view(torch.uint8))
        self._broadcast(torch.tensor(bytearray(message), dtype=torch.uint8))

    def receive(self) -> bytes:
        """The next message of the first process."""
        length = torch.zeros(_LENGTH_BYTES, dtype=torch.uint8)
        self._broadcast(length)
        message = torch.zeros(int(length.view(torch.int64)), dtype=torch.uint8)
        self._broadcast(message)
        return message.numpy().tobytes()

    def _broadcast(self, tensor: Tensor) -> None:
        options = _GROUPS.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, timedelta(seconds=self._place.answer)
        try:
            self._open.broadcast([tensor], options).wait()
        except RuntimeError as error:
            raise self._loss(error, self._place.answer) from error

    @property
    def _open(self) -> Any:
        assert self._group is not None, "the group was left"
        return self._group

    def _loss(self, error: RuntimeError, seconds: float) -> EngineError:
        """Who is lost, by the word that it left."""
        self._lost = True
        words = {rank: self._store.get(self._word(rank)).decode() for rank in range(self.size)
                 if self._store.check([self._word(rank)])}
        if words:
            rank, word = min(words.items())
            return EngineError(f"process {rank} of the partition's {self.size} ended: {word}")
        return EngineError(f"a process of the partition's {self.size} ended without a word, or gave no answer within "
                           f"{seconds:g} s: {error}")

    @staticmethod
    def _word(rank: int) -> str:
        return f"last word of {rank}"
