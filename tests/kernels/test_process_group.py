"""Laws of processes that compute together: what they gather is what each gave, and an end is told by name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
import torch

from batchgen_beam.errors import EngineError
from batchgen_beam.kernels.process_group import MeetingPlace, ProcessGroup
from tests.kernels.partitions import in_partition


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_everyone_gathers_what_each_gave(tmp_path: Path, dtype: torch.dtype) -> None:
    """Columns of different counts, none of them, and no tokens: bytes arrive as they were, in order of rank."""
    generator = torch.Generator().manual_seed(1)
    for number, (tokens, widths) in enumerate(((5, (3, 7, 0)), (1, (2, 2, 2)), (0, (4, 4, 1)))):
        given = [(torch.randn(tokens, width, generator=generator) * 100).to(dtype) for width in widths]
        found = in_partition(tmp_path / str(number), 3,
                             lambda group, given=given, widths=widths: group.gather(given[group.rank], widths))
        assert all(torch.equal(one, other) for parts in found for one, other in zip(parts, given, strict=True))


def test_messages_arrive_whole_and_in_order(tmp_path: Path) -> None:
    """Every other process receives what the first sends, an empty message too."""
    messages = [b"first", b"", bytes(range(256)) * 100]

    def work(group: ProcessGroup) -> list[bytes]:
        if group.rank:
            return [group.receive() for _ in messages]
        for message in messages:
            group.send(message)
        return messages

    assert in_partition(tmp_path / "p", 3, work) == [messages] * 3


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_anywhere_ends_all_by_name(tmp_path: Path, failing: int) -> None:
    """One leaves by an error while the others wait for it: each of them gets an error that names it and its words."""
    found: dict[int, str] = {}

    def work(group: ProcessGroup) -> None:
        if group.rank == failing:
            raise ValueError("no more memory")
        with pytest.raises(EngineError) as caught:
            group.gather(torch.ones(1, 1), (1, 1, 1))
        found[group.rank] = str(caught.value)

    with pytest.raises(ValueError, match="no more memory"):
        in_partition(tmp_path / "p", 3, work)
    assert found == dict.fromkeys({0, 1, 2} - {failing},
                                  f"process {failing} of the partition's 3 ended: ValueError: no more memory")


def test_one_that_never_comes_is_missed(tmp_path: Path) -> None:
    """A partition that does not fill up ends with an error that says how long it waited."""
    with pytest.raises(EngineError, match=r"a process of the partition's 2 ended .*no answer within 0\.5 s"):
        ProcessGroup(MeetingPlace(folder=tmp_path, size=2, join=0.5, answer=60), 0)


def test_one_that_gives_no_answer_is_missed(tmp_path: Path) -> None:
    """One that computes on its own way for too long is lost to the others, who say how long they waited."""
    place, waited = MeetingPlace(folder=tmp_path, size=2, join=60, answer=0.5), Event()

    def work(rank: int) -> None:
        with ProcessGroup(place, rank) as group:
            group.meet()
            if rank:
                assert waited.wait(60)
                return
            with pytest.raises(EngineError, match=r"gave no answer within 0\.5 s"):
                group.gather(torch.ones(1, 1), (1, 1))
            waited.set()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(work, range(2)))
