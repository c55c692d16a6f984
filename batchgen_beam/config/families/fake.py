"""The fake model, one per cache kind: exercises engine and pipeline without weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from batchgen_beam.config.base import ModelConfig, eos_field
from batchgen_beam.config.model_registry import register_config
from batchgen_beam.config.reading import json_field
from batchgen_beam.errors import CheckpointError

__all__ = ["FakeConfig"]


@register_config("batchgen_fake")
@dataclass(frozen=True, slots=True, kw_only=True)
class FakeConfig(ModelConfig):
    """`kind` is the cache kind of all layers; `window` (tokens) is used by `windowed` alone.

    About one token in `eos_every` is the first of `eos_token_ids`; 0 or no such id: never.
    """

    kinds: ClassVar[tuple[str, ...]] = ("paged", "windowed", "state")

    model_type: str = "batchgen_fake"
    vocab_size: int = 256
    hidden_size: int = 8
    num_hidden_layers: int = 2
    max_position_embeddings: int = 4096
    bos_token_id: int | None = json_field(None, least=0)
    eos_token_ids: tuple[int, ...] = eos_field()
    kind: str = "paged"
    window: int = 128
    eos_every: int = json_field(64, least=0)

    def __post_init__(self) -> None:
        if self.kind not in self.kinds:
            raise CheckpointError(f"kind {self.kind!r} is unknown; use one of {', '.join(self.kinds)}")
