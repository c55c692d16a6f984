"""What a model folder says about text and limits, read once per process.

Owns the putting together of configuration, tokenizer, template and sampling defaults, and what a run puts in their
place.  Opens no tensor and does not know the engine.
"""

from __future__ import annotations

import hashlib
import socket
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from batchgen_beam.config.base import ModelConfig
from batchgen_beam.config.model_registry import load_config
from batchgen_beam.errors import CheckpointError, OptionError
from batchgen_beam.records import Fingerprint
from batchgen_beam.settings import GenerationDefaults
from batchgen_beam.text.model_files import ModelDefaults
from batchgen_beam.text.parameters import ParameterRules
from batchgen_beam.text.prepare import Preparer
from batchgen_beam.text.template import ChatTemplate, TemplateText
from batchgen_beam.text.tokenizer import Tokenizer
from batchgen_beam.transforms.model_facts import read_weights_identity
from batchgen_beam.transforms.model_store import resolve_model
from batchgen_beam.weights.identity import weights_identity

__all__ = ["ModelFolder", "ModelSource"]

_NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """A model without its weights.  `context_limit` is the least of the model's own and the user's.

    `eos_ids` is the union of what the model's files name, or what the user gave instead.  `known_weights`: the identity
    of weights that are not in the folder.
    """

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: ModelDefaults
    eos_ids: frozenset[int]
    context_limit: int
    known_weights: str | None = None

    @classmethod
    def open(cls, path: Path, *, template: TemplateText | None, clock: datetime, max_context: int | None,
             eos_ids: tuple[int, ...] | None = None, known_weights: str | None = None) -> ModelFolder:
        """Read the folder's small files; a `CheckpointError` or `OptionError` names what can't be used."""
        config = load_config(str(path))
        tokenizer = Tokenizer.load(path)
        limit = config.max_position_embeddings
        own = tokenizer.eos_ids(path)
        _check_model_eos(path, own, config.vocab_size)
        return cls(
            path=path,
            config=config,
            tokenizer=tokenizer,
            template=ChatTemplate.load(path, specials=tokenizer.special_tokens, clock=clock, own=template),
            defaults=ModelDefaults.load(path),
            eos_ids=own if eos_ids is None else _own_eos_ids(eos_ids, config.vocab_size),
            context_limit=min(limit, max_context or limit),
            known_weights=known_weights,
        )

    @property
    def text_vocabulary(self) -> int:
        """Ids from here on have no text and are never sampled."""
        return min(self.tokenizer.vocabulary_size, self.config.vocab_size)

    def content(self) -> dict[str, object]:
        """The model's part of the content print: what of its files decides the answers, by name."""
        return {
            "model_config": hashlib.sha256((self.path / "config.json").read_bytes()).hexdigest()[:32],
            "weights": (self.known_weights or weights_identity(self.path))[:32],
            "tokenizer": self.tokenizer.identity,
            "template": _NONE if self.template is None else self.template.identity,
            "eos_ids": sorted(self.eos_ids),
            "context_limit": self.context_limit,
        }

    def preparer(self, defaults: GenerationDefaults) -> Preparer:
        """What makes prompts of input rows under the run's defaults."""
        return Preparer(self.tokenizer, self.template, defaults, self.defaults, self.context_limit)

    def parameter_rules(self, defaults: GenerationDefaults) -> ParameterRules:
        """How rows' parameters are completed under the run's defaults; an `OptionError` for one out of its range."""
        return ParameterRules(defaults, self.defaults)


def _check_model_eos(path: Path, ids: frozenset[int], vocabulary: int) -> None:
    outside = sorted(token for token in ids if token >= vocabulary)
    if outside:
        raise CheckpointError(f"model {path}: its EOS id {outside[0]} is outside its vocabulary of {vocabulary} ids; "
                              "correct vocab_size or eos_token_id in its files")


def _own_eos_ids(ids: tuple[int, ...], vocabulary: int) -> frozenset[int]:
    for token in ids:
        if not 0 <= token < vocabulary:
            raise OptionError(f"--eos-ids: {token} is outside the model's vocabulary of {vocabulary} ids")
    return frozenset(ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """What opens the model on any machine of the run.  `eos_ids` None: the model's own.

    `content`: what `ModelFolder.content` has to be, as the launcher found it; None where nothing was found before.
    """

    model: str
    model_cache: str
    clock: datetime
    template: TemplateText | None = None
    eos_ids: tuple[int, ...] | None = None
    content: Fingerprint | None = None

    def open(self, *, max_context: int | None) -> ModelFolder:
        """The model's small files, copied or converted first where it is elsewhere or a GGUF file.

        Raises:
            CheckpointError: it can't be used, or is another one than `content` says.
            OptionError: the model cache can't hold it.
        """
        model = self._open(resolve_model(self.model, Path(self.model_cache)), max_context)
        if self.content is not None:
            self._check_content(Fingerprint.of(model.content()), self.content)
        return model

    def open_facts(self, folder: Path, *, max_context: int | None) -> ModelFolder:
        """The same from the model's facts, without the model."""
        return self._open(folder, max_context, read_weights_identity(folder))

    def _open(self, folder: Path, max_context: int | None, weights: str | None = None) -> ModelFolder:
        return ModelFolder.open(folder, template=self.template, clock=self.clock, max_context=max_context,
                                eos_ids=self.eos_ids, known_weights=weights)

    def _check_content(self, found: Fingerprint, wanted: Fingerprint) -> None:
        differences = found.differences(wanted)  # what the launcher read -> what is here
        if differences:
            raise CheckpointError(f"model {self.model} on {socket.gethostname()} is not the one that the launcher read "
                                  f"({'; '.join(differences)}); give both the same files")
