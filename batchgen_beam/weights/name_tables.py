"""Which tensors a model is made of: checkpoint name, parameter, shape, and when it exists.  One table per model type:
that of Llama is here, those of sparse families in `family_tables`.

Owns the strict matching: no unknown name, no parameter unfilled, ignored names listed.  Does not
know files, dtypes or torch.

Shape letters: V vocabulary, D hidden size, Q query heads * head size, K key/value heads * head size, I intermediate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from batchgen_beam.config.base import ModelConfig
from batchgen_beam.config.families.deepseek import MlaConfig
from batchgen_beam.config.families.fake import FakeConfig
from batchgen_beam.config.families.gpt_oss import GptOssConfig
from batchgen_beam.config.families.llama import LlamaConfig
from batchgen_beam.config.families.mistral import MixtralConfig
from batchgen_beam.config.families.qwen import Qwen3MoeConfig
from batchgen_beam.config.model_registry import is_supported
from batchgen_beam.errors import CheckpointError
from batchgen_beam.weights.family_tables import sparse_parameters
from batchgen_beam.weights.parameter import Parameter
from batchgen_beam.weights.shards import clip_names

__all__ = ["EMBEDDING", "HEAD", "Parameter", "expected_parameters", "match_names"]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

_LLAMA: tuple[tuple[str, str, str, Callable[[LlamaConfig], bool] | None], ...] = (
    (EMBEDDING, "embedding", "VD", None),
    ("model.layers.{i}.input_layernorm.weight", "layers.{i}.attention_norm", "D", None),
    ("model.layers.{i}.self_attn.q_proj.weight", "layers.{i}.attention.q", "QD", None),
    ("model.layers.{i}.self_attn.k_proj.weight", "layers.{i}.attention.k", "KD", None),
    ("model.layers.{i}.self_attn.v_proj.weight", "layers.{i}.attention.v", "KD", None),
    ("model.layers.{i}.self_attn.o_proj.weight", "layers.{i}.attention.o", "DQ", None),
    ("model.layers.{i}.self_attn.q_proj.bias", "layers.{i}.attention.q.bias", "Q", lambda c: c.attention_bias),
    ("model.layers.{i}.self_attn.k_proj.bias", "layers.{i}.attention.k.bias", "K", lambda c: c.attention_bias),
    ("model.layers.{i}.self_attn.v_proj.bias", "layers.{i}.attention.v.bias", "K", lambda c: c.attention_bias),
    ("model.layers.{i}.self_attn.o_proj.bias", "layers.{i}.attention.o.bias", "D", lambda c: c.attention_bias),
    ("model.layers.{i}.post_attention_layernorm.weight", "layers.{i}.feed_forward_norm", "D", None),
    ("model.layers.{i}.mlp.gate_proj.weight", "layers.{i}.feed_forward.gate", "ID", None),
    ("model.layers.{i}.mlp.up_proj.weight", "layers.{i}.feed_forward.up", "ID", None),
    ("model.layers.{i}.mlp.down_proj.weight", "layers.{i}.feed_forward.down", "DI", None),
    ("model.layers.{i}.mlp.gate_proj.bias", "layers.{i}.feed_forward.gate.bias", "I", lambda c: c.mlp_bias),
    ("model.layers.{i}.mlp.up_proj.bias", "layers.{i}.feed_forward.up.bias", "I", lambda c: c.mlp_bias),
    ("model.layers.{i}.mlp.down_proj.bias", "layers.{i}.feed_forward.down.bias", "D", lambda c: c.mlp_bias),
    ("model.norm.weight", "norm", "D", None),
    (HEAD, "head", "VD", lambda c: not c.tie_word_embeddings),
)

_IGNORED = (
    re.compile(r"(.*\.)?rotary_emb\.inv_freq"),
)
"""Stored by old tools and recomputed from the configuration."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def expected_parameters(config: ModelConfig, stored: Collection[str] = ()) -> tuple[Parameter, ...]:
    """Every parameter of the model, in order of its type's table.

    `stored` names decide between several layouts of one model.  The fake model has no parameter.  A type without a
    table is a `CheckpointError`: nothing could be checked.
    """
    match config:
        case FakeConfig():
            return ()
        case LlamaConfig():
            return _llama_parameters(config)
        case MixtralConfig() | Qwen3MoeConfig() | MlaConfig() | GptOssConfig() if is_supported(config):
            return sparse_parameters(config, stored)
    raise CheckpointError(f"{config.name_or_path or 'the model'}: no table of tensors is written for model type "
                          f"{config.model_type!r}")


def _llama_parameters(config: LlamaConfig) -> tuple[Parameter, ...]:
    sizes = {
        "V": config.vocab_size, "D": config.hidden_size, "I": config.intermediate_size,
        "Q": config.num_attention_heads * config.head_dim, "K": config.num_key_value_heads * config.head_dim,
    }
    return tuple(
        Parameter(name=name.format(i=i), stored=stored.format(i=i), shape=tuple(sizes[letter] for letter in letters))
        for stored, name, letters, exists in _LLAMA if exists is None or exists(config)
        for i in range(config.num_hidden_layers if "{i}" in stored else 1)
    )


def match_names(config: ModelConfig, parameters: Iterable[Parameter], stored: Iterable[str],
                where: Path) -> tuple[str, ...]:
    """Match stored names with parameters both ways, and return those that are left unread on purpose, sorted.

    `lm_head.weight` beside tied embeddings is one of them: whether it says the same as the embeddings is the
    caller's question.  A `CheckpointError` names what is missing and what is unknown, at `where`.
    """
    names = set(stored)
    ignored = {name for name in names if any(pattern.fullmatch(name) for pattern in _IGNORED)}
    if config.tie_word_embeddings:
        ignored |= names & {HEAD}
    ignored |= {name for name in names if (match := _LAYER.match(name)) and int(match[1]) in _unused_layers(config)}
    wanted = {parameter.stored for parameter in parameters}
    _check_layers(config, names - ignored, where)
    _check_head(wanted - names, where)
    missing, unknown = wanted - names, names - ignored - wanted
    if missing or unknown:
        raise CheckpointError(f"{where}: the stored tensors do not fit model type {config.model_type!r}: "
                              f"{len(missing)} missing ({clip_names(missing)}), {len(unknown)} unknown "
                              f"({clip_names(unknown)})")
    return tuple(sorted(ignored))


def _unused_layers(config: ModelConfig) -> range:
    """Numbers of layers that predict further tokens, and are no part of the model itself."""
    begin = config.num_hidden_layers
    return range(begin, begin + (config.num_nextn_predict_layers if isinstance(config, MlaConfig) else 0))


def _check_head(missing: set[str], where: Path) -> None:
    if missing == {HEAD}:
        raise CheckpointError(f"{where}: {HEAD} is absent, and config.json does not set tie_word_embeddings; either "
                              "the output projection is missing, or the embeddings are tied and config.json has to "
                              "say so")


def _check_layers(config: ModelConfig, names: set[str], where: Path) -> None:
    found = {int(match[1]) for name in names if (match := _LAYER.match(name))}
    wanted = set(range(config.num_hidden_layers))
    if found and found != wanted:
        raise CheckpointError(f"{where}: config.json says {config.num_hidden_layers} layers, the files hold "
                              f"{len(found)}: missing layers {sorted(wanted - found)[:8]}, too many "
                              f"{sorted(found - wanted)[:8]}")
