"""What a model folder says about text and limits, read once per process.

Owns the putting together of configuration, tokenizer, template and sampling defaults.  Opens no tensor and does not
know the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from batchgen_beam.config.base import ModelConfig
from batchgen_beam.config.model_registry import load_config
from batchgen_beam.settings import GenerationDefaults
from batchgen_beam.text.model_files import ModelDefaults
from batchgen_beam.text.prepare import Preparer
from batchgen_beam.text.template import ChatTemplate
from batchgen_beam.text.tokenizer import Tokenizer

__all__ = ["ModelFolder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model without its weights.  `context_limit` is the least of the model's own and the user's."""

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: ModelDefaults
    eos_ids: frozenset[int]
    context_limit: int

    @classmethod
    def open(cls, path: Path, *, template_file: Path | None, clock: datetime, max_context: int | None) -> ModelFolder:
        """Read the folder's small files; a `CheckpointError` or `OptionError` names what can't be used."""
        config = load_config(str(path))
        tokenizer = Tokenizer.load(path)
        limit = config.max_position_embeddings
        return cls(
            path=path,
            config=config,
            tokenizer=tokenizer,
            template=ChatTemplate.load(path, specials=tokenizer.special_tokens, clock=clock,
                                       template_file=template_file),
            defaults=ModelDefaults.load(path),
            eos_ids=tokenizer.eos_ids(path),
            context_limit=min(limit, max_context or limit),
        )

    @property
    def text_vocabulary(self) -> int:
        """Ids from here on have no text and are never sampled."""
        return min(self.tokenizer.vocabulary_size, self.config.vocab_size)

    def preparer(self, defaults: GenerationDefaults) -> Preparer:
        """What makes prompts of input rows under the run's defaults."""
        return Preparer(self.tokenizer, self.template, defaults, self.defaults, self.context_limit)
