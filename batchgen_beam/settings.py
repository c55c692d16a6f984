"""What a run may choose, checked once when built.  Knows no torch, Beam or files."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen_beam.errors import OptionError

__all__ = [
    "DTYPES",
    "OUTPUT_VERSION",
    "PAGE_TOKENS",
    "PARAMETER_COLUMNS",
    "UNSUPPORTED_COLUMNS",
    "EngineSettings",
    "GenerationDefaults",
    "InputColumns",
]

PAGE_TOKENS = 64
"""Tokens of one KV page; a sequence meets the scheduler when it fills one."""

OUTPUT_VERSION = 1
"""Part of the content print: raised when the same input would be answered otherwise."""

PARAMETER_COLUMNS = ("temperature", "top_k", "top_p", "seed", "max_tokens", "logprobs")
"""Input columns that are parameters of their row."""

UNSUPPORTED_COLUMNS = (
    "n", "stop", "stop_token_ids", "min_p", "min_tokens", "ignore_eos", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "logit_bias", "bad_words", "response_format", "tools", "top_logprobs", "max_completion_tokens",
    "chat_template_kwargs",
)
"""Known parameters without effect in this release: a value in such a column fails its row by name (never silence)."""

DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Budgets of one engine.  Bytes are bytes of KV; tokens are rows of one forward pass.

    `prefill_chunk` 0 takes a prompt whole.  `kv_host_memory` 0 turns the host tier (HELD) off.
    """

    dtype: str = "bfloat16"
    threads: int = 0
    max_rows: int = 256
    step_tokens: int = 512
    prefill_chunk: int = 256
    kv_memory: int = 1 << 30
    kv_host_memory: int = 0
    max_context: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise OptionError(f"dtype {self.dtype!r} is unknown; use one of {', '.join(DTYPES)}")
        for name, least in (("threads", 0), ("max_rows", 1), ("step_tokens", 1), ("prefill_chunk", 0),
                            ("kv_memory", 1), ("kv_host_memory", 0), ("max_context", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise OptionError(f"{name} must be at least {least}, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What applies where a row says nothing; None falls through to the model's generation_config.json."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int = 0
    logprobs: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class InputColumns:
    """Names of the columns that are read.  `keep` are copied to the results, `ignore` are never parameters."""

    id: str = "uuid"
    prompt: str = "prompt"
    messages: str = "messages"
    token_ids: str = "token_ids"
    keep: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
