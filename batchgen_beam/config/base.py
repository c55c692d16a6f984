"""What every model configuration has, and what every decoder with ordinary attention has.

Owns the derived sizes and the checks between keys.  Does not know single families, files, names or torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from batchgen_beam.config.quantization import Quantization, read_quantization
from batchgen_beam.config.reading import JsonObject, json_field, read_fields
from batchgen_beam.config.rope import PLAIN_KINDS, RopeParameters, rope_reader
from batchgen_beam.errors import CheckpointError

__all__ = ["DERIVED", "DecoderConfig", "ModelConfig", "eos_field", "read_eos_ids", "too_many_chosen"]

DERIVED = 0
"""Default of a size that follows from others when the file does not give it."""


def read_eos_ids(source: JsonObject) -> tuple[int, ...] | None:
    """The ids under `eos_token_id`, one or a list; None where it is absent or null, which says nothing."""
    if isinstance(source.values.get("eos_token_id"), list):
        ids: tuple[int, ...] = source.read("eos_token_id", tuple[int, ...])
        if min(ids, default=0) < 0:
            raise source.error(f"eos_token_id must hold ids of at least 0, got {list(ids)}")
        return ids
    one = source.read("eos_token_id", int, 0)
    return None if one is None else (one,)


def eos_field(*ids: int) -> Any:
    """The end-of-sequence ids with the family's defaults; the file gives one id or a list."""
    return json_field(ids, reader=lambda source, default: read_eos_ids(source))


def too_many_chosen(chosen: int | None, experts: int) -> tuple[str, ...]:
    """For `ModelConfig.unsupported`: a token can go to each expert once."""
    if chosen is not None and chosen <= experts:
        return ()
    return (f"num_experts_per_tok {'null' if chosen is None else chosen} of {experts} experts",)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Facts that hold for any model.  `quantization` is how weights are stored, None for plain ones."""

    architecture_names: ClassVar[tuple[str, ...]] = ()
    """Values of `architectures` in config.json that mean this class."""

    name_or_path: str = json_field("", reader=lambda source, default: None)
    model_type: str = ""
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = eos_field()
    dtype: str | None = json_field(None, "dtype", "torch_dtype")
    quantization: Quantization | None = field(default=None, metadata={"reader": read_quantization})

    def unsupported(self) -> tuple[str, ...]:
        """Values that no model here computes, each as `key value`; empty for a configuration that runs."""
        return ()

    @classmethod
    def from_json(cls, source: JsonObject, **given: Any) -> Self:
        """The configuration that `source` describes; keys in `given` win.  Errors name the file."""
        try:
            return cls(**(read_fields(cls, source) | given))
        except CheckpointError as error:
            text = str(error)
            raise error if text.startswith(source.where) else source.error(text) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """A decoder of attention with rotary positions and a gated feed-forward part.

    Absent `num_key_value_heads` means as many as query heads, absent `head_dim` means hidden size / query heads.
    """

    activations: ClassVar[tuple[str, ...]] = ("silu",)

    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int = DERIVED
    head_dim: int = DERIVED
    hidden_act: str = "silu"
    rms_norm_eps: float = json_field(1e-6, least=0.0)
    rope: RopeParameters = field(default=RopeParameters(), metadata=rope_reader(*PLAIN_KINDS))
    attention_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_key_value_heads == DERIVED:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        if self.head_dim == DERIVED:
            self._derive_head_dim()
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(f"num_attention_heads {self.num_attention_heads} is no multiple of "
                                  f"num_key_value_heads {self.num_key_value_heads}")
        if self.hidden_act not in self.activations:
            raise CheckpointError(f"hidden_act {self.hidden_act!r} is not supported for model type "
                                  f"{self.model_type!r}; supported: {', '.join(self.activations)}")

    def unsupported(self) -> tuple[str, ...]:
        """Rotation of a part of a head, unless the family has it."""
        part = self.rope.partial_rotary_factor
        return () if part == 1.0 else (f"partial_rotary_factor {part}",)

    def _derive_head_dim(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise CheckpointError(f"hidden_size {self.hidden_size} is no multiple of num_attention_heads "
                                  f"{self.num_attention_heads}, and head_dim is not given")
        object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
