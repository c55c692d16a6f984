"""Hosts over the fake model, prompts for it, and Beam's state by hand."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from batchgen_beam.records import EngineRow, InputRow, Prompt, RowKey, SamplingParams, token_array
from batchgen_beam.settings import EngineSettings, GenerationDefaults
from batchgen_beam.transforms.generate import GenerateLane, Round
from batchgen_beam.transforms.host import HostHandle, HostSettings
from batchgen_beam.transforms.lanes import PromptChunk
from batchgen_beam.transforms.model_folder import ModelSource
from batchgen_beam.transforms.recording import JournalPlace


def host_handle(folder: Path, *, progress: Path | None = None, journal: JournalPlace | None = None,
                **engine: Any) -> HostHandle:
    """A handle on the fake model, small budgets."""
    settings = EngineSettings(**{"dtype": "float32", "threads": 1, "max_rows": 8, "step_tokens": 128,
                                 "kv_memory": 1 << 22, **engine})
    source = ModelSource(model=str(folder), model_cache=str(folder.parent / "cache"),
                         clock=datetime(2026, 1, 1, tzinfo=UTC))
    return HostHandle(HostSettings(
        source=source, engine=settings, defaults=GenerationDefaults(temperature=0.0), content_print="content",
        progress=None if progress is None else str(progress), progress_interval=0.05, journal=journal))


def make_prompt(index: int, *, max_tokens: int = 24, **params: float) -> Prompt:
    """A prompt whose ids follow from its index; some are longer than a page."""
    key = RowKey(f"row-{index}", hashlib.sha256(str(index).encode()).hexdigest())
    ids = token_array((32 + (index * 7 + place * 3) % 90) for place in range(5 + index * 13 % 90))
    given = SamplingParams(**{"temperature": 0.0, "max_tokens": max_tokens, **params})
    return Prompt(key=key, token_ids=ids, params=given)


def input_row(index: int, **values: object) -> InputRow:
    """An input row with the given values."""
    return InputRow(key=RowKey(f"row-{index}", hashlib.sha256(repr(values).encode()).hexdigest()), values=values)


@dataclass
class Bag:
    """A bag of Beam state: what was added since it was cleared."""

    items: list[Any] = field(default_factory=list)

    def add(self, item: Any) -> None:
        self.items.append(item)

    def read(self) -> Iterator[Any]:
        return iter(list(self.items))

    def clear(self) -> None:
        self.items.clear()

    def copy(self) -> Bag:
        return Bag(list(self.items))


class Timer:
    """A timer that remembers nothing: tests fire it themselves."""

    def set(self, timestamp: Any) -> None:
        """Any time will do."""


class Window:
    """A window that ends at some time."""

    def max_timestamp(self) -> int:
        """Its end."""
        return 0


ONE_ROUND = Round()


@dataclass
class LaneByHand:
    """One lane of a `GenerateLane`, its state and bundles in the test's hands."""

    step: GenerateLane
    lane: str = "lane"
    admitted: Bag = field(default_factory=Bag)
    done: Bag = field(default_factory=Bag)

    @classmethod
    def of(cls, handle: HostHandle, this: Round = ONE_ROUND) -> LaneByHand:
        """A lane of a step that has been set up."""
        step = GenerateLane(handle, this)
        step.setup()
        return cls(step)

    def begin(self) -> tuple[Bag, Bag]:
        """Start a bundle; returns the state as it was, to go back to if the bundle is abandoned."""
        self.step.start_bundle()
        return self.admitted.copy(), self.done.copy()

    def abandon(self, before: tuple[Bag, Bag]) -> None:
        """The runner throws the bundle away."""
        self.admitted, self.done = before

    def process(self, prompts: Iterable[EngineRow]) -> list[tuple[str, Any]]:
        """One chunk."""
        element = (self.lane, PromptChunk(tuple(prompts)))
        return list(self.step.process(element, self.admitted, self.done, Timer(), Window()))

    def finish(self) -> list[tuple[str, Any]]:
        """The timer."""
        return list(self.step.finish_lane(self.lane, self.admitted, self.done))
