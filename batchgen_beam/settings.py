"""What a run may choose, checked once when built.  Knows no torch, Beam or files."""

from __future__ import annotations

import re
from dataclasses import dataclass

from batchgen_beam.errors import OptionError

__all__ = [
    "DTYPES",
    "FLOAT_COLUMNS",
    "KERNELS",
    "KV_DTYPES",
    "OUTPUT_VERSION",
    "PAGE_TOKENS",
    "PARAMETER_COLUMNS",
    "UNSUPPORTED_COLUMNS",
    "EngineSettings",
    "GenerationDefaults",
    "InputColumns",
    "JournalSettings",
    "WorkerNeeds",
]

PAGE_TOKENS = 64
"""Tokens of one KV page; a sequence meets the scheduler when it fills one."""

OUTPUT_VERSION = 1
"""Part of the content print: raised when the same input would be answered otherwise."""

PARAMETER_COLUMNS = ("temperature", "top_k", "top_p", "seed", "max_tokens", "logprobs")
"""Input columns that are parameters of their row."""

FLOAT_COLUMNS = ("temperature", "top_p")
"""Those of them that are real numbers: an integer there is the equal float.  The others are integers."""

UNSUPPORTED_COLUMNS = (
    "n", "stop", "stop_token_ids", "min_p", "min_tokens", "ignore_eos", "repetition_penalty", "frequency_penalty",
    "presence_penalty", "logit_bias", "bad_words", "response_format", "tools", "top_logprobs", "max_completion_tokens",
    "chat_template_kwargs", "tool_choice", "reasoning_effort", "skip_special_tokens", "include_stop_str_in_output",
    "prompt_logprobs", "best_of", "continue_final_message", "add_generation_prompt", "truncate_prompt_tokens",
    "length_penalty", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
)
"""Known parameters without effect in this release: a value in such a column fails its row by name (never silence)."""

DTYPES = ("bfloat16", "float32")

KV_DTYPES = ("auto", "int8")
"""What keys and values are kept in: the dtype of the arithmetic, or int8 with a scale for each token and head."""

KERNELS = ("auto", "native", "torch")
"""Kernel sets by name; `auto` is native where it can be, else torch."""

MOST_TAIL_PROCESSES = 64
"""Far more than pays; each is a whole process with its part of the weights."""

_ACCELERATOR = re.compile(r"type:[\w.-]+;count:[1-9]\d*(;[\w:.-]+)*", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Arithmetic and budgets of one engine.

    `kv_dtype` is what keys and values are kept in, `auto`: in `dtype`.
    `max_rows` rows run at once; a forward pass takes about `step_tokens` tokens, prompts in chunks of `prefill_chunk`
    (0: whole); attention runs on `attention_batch` rows at a time and what goes token by token on `expert_batch` tokens
    (0: all), which changes memory and time but no bit; `kv_memory` and `kv_host_memory` are bytes,
    0 on the host turns that tier (HELD) off; so is `weight_memory`, under which weights that do not fit are streamed,
    which changes no bit either (0: all are in memory); `threads` 0 is one per core, `kv_memory` 0 a share of what is
    free, both found by whoever loads the engine; `max_context` (tokens) bounds prompt and answer below the model's own
    limit; `tail_processes` compute the last row together where that is faster (1: none), which changes no bit; with
    `prefix_sharing`, full pages that several prompts begin with are computed and kept once; with
    `longest_first`, rows that may run longest are admitted first.
    """

    dtype: str = "bfloat16"
    kv_dtype: str = "auto"
    kernels: str = "auto"
    threads: int = 0
    max_rows: int = 256
    step_tokens: int = 512
    prefill_chunk: int = 256
    attention_batch: int = 0
    expert_batch: int = 0
    kv_memory: int = 1 << 30
    kv_host_memory: int = 0
    weight_memory: int = 0
    max_context: int | None = None
    tail_processes: int = 1
    prefix_sharing: bool = True
    longest_first: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise OptionError(f"dtype {self.dtype!r} is unknown; use one of {', '.join(DTYPES)}")
        if self.kv_dtype not in KV_DTYPES:
            raise OptionError(f"kv_dtype {self.kv_dtype!r} is unknown; use one of {', '.join(KV_DTYPES)}")
        if self.kernels not in KERNELS:
            raise OptionError(f"kernels {self.kernels!r} are unknown; use one of {', '.join(KERNELS)}")
        for name, least in (("threads", 0), ("max_rows", 1), ("step_tokens", 1), ("prefill_chunk", 0),
                            ("attention_batch", 0), ("expert_batch", 0), ("kv_memory", 0), ("kv_host_memory", 0),
                            ("weight_memory", 0), ("max_context", 2), ("tail_processes", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise OptionError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
        if self.tail_processes > MOST_TAIL_PROCESSES:
            raise OptionError(f"--tail-processes must be at most {MOST_TAIL_PROCESSES}, got {self.tail_processes}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """What applies where a row says nothing.

    None falls through to the model's generation_config.json, except `max_tokens`: without one the context is the limit.
    """

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


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSettings:
    """How durable a run is while it goes on, in seconds.

    An answer is written at most `flush_seconds` after it was found, a running row's state once it has run for
    `checkpoint_seconds` more and has grown by a quarter.  Parts of ended runs are merged when they are older than
    `compact_seconds`.
    """

    flush_seconds: float = 30.0
    checkpoint_seconds: float = 30.0
    compact_seconds: float = 3600.0

    def __post_init__(self) -> None:
        for name, flag in (("flush_seconds", "--flush-interval"), ("checkpoint_seconds", "--checkpoint-interval"),
                           ("compact_seconds", "--compact-after")):
            value = getattr(self, name)
            if not 0 <= value <= 86_400 * 365:
                raise OptionError(f"{flag} must be a number of seconds between 0 and a year, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerNeeds:
    """What the machines of the generate step should have.

    `accelerator` as Beam's hint of that name takes it, `type:nvidia-l4;count:1;install-nvidia-driver`; `ram` in bytes;
    None, 0: as the runner likes.
    """

    accelerator: str | None = None
    ram: int = 0

    def __post_init__(self) -> None:
        if self.accelerator is not None and not _ACCELERATOR.fullmatch(self.accelerator):
            raise OptionError(f"--accelerator={self.accelerator} is none; write type:NAME;count:N, with "
                              ";install-nvidia-driver for a GPU on Dataflow")

    def hints(self) -> dict[str, str | int]:
        """Beam's resource hints."""
        hints: dict[str, str | int | None] = {"accelerator": self.accelerator, "min_ram": self.ram}
        return {name: value for name, value in hints.items() if value}
