"""The language model inside a checkpoint of a model that also sees: which tensors are its own, and under which names.

Owns the prefixes that such checkpoints put before the language model's names, and the names of the parts that work on
images, which a text job leaves unread.  Does not know tables of parameters, files' contents or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from batchgen_beam.config.base import ModelConfig
from batchgen_beam.config.families.deepseek import KimiK25Config
from batchgen_beam.errors import CheckpointError
from batchgen_beam.weights.headers import TensorFacts
from batchgen_beam.weights.shards import clip_names

__all__ = ["text_part"]

_PREFIXES = (("language_model.model.", "model."), ("model.language_model.", "model."),
             ("language_model.lm_head.", "lm_head."))
_OTHER_PARTS = ("vision_tower.", "mm_projector.", "multi_modal_projector.")
_OUTER = "model."


def text_part(config: ModelConfig, stored: Mapping[str, TensorFacts],
              where: Path) -> tuple[Mapping[str, TensorFacts], tuple[str, ...]]:
    """The language model's tensors under the names that they have in a checkpoint of it alone, and the stored names of
    the other parts, sorted.  A `CheckpointError`, at `where`, names tensors that come under both names."""
    if not isinstance(config, KimiK25Config):
        return stored, ()
    others = {name for name in stored if name.removeprefix(_OUTER).startswith(_OTHER_PARTS)}
    own = {name: tensor for name, tensor in stored.items() if name not in others}
    found = {_plain(name): tensor for name, tensor in own.items()}
    if len(found) < len(own):
        twice = [name for name, tensor in own.items() if found[_plain(name)] is not tensor]
        raise CheckpointError(f"{where} holds tensors with and without the prefix of the language model: "
                              f"{clip_names(twice)}")
    return found, tuple(sorted(others))


def _plain(name: str) -> str:
    return next((plain + name.removeprefix(prefix) for prefix, plain in _PREFIXES if name.startswith(prefix)), name)
