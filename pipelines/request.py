"""What a run was asked for: the flags as checked values.

Owns which flags are needed and how they become settings.  Opens no file.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchgen_beam.errors import ErrorCode, OptionError
from batchgen_beam.pipelines.options import BatchgenOptions
from batchgen_beam.settings import EngineSettings, GenerationDefaults, InputColumns, JournalSettings, WorkerNeeds

__all__ = ["RunRequest"]

MAX_PROGRESS_INTERVAL = 86_400
"""Seconds: a day."""

MAX_THREADS = 1_024
"""Threads of one engine; where a system refuses to start more, the thread library ends the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """One `batchgen-beam run`.  `engine` may leave threads and KV memory (0) to each worker.

    `eos_ids` None: the model's own.
    """

    inputs: tuple[str, ...]
    output: str
    model: str
    model_cache: str
    model_facts: str | None
    chat_template: str | None
    engine: EngineSettings
    eos_ids: tuple[int, ...] | None
    defaults: GenerationDefaults
    columns: InputColumns
    lanes: int
    rounds: int
    limit: int | None
    retry: frozenset[ErrorCode]
    new_fingerprint: bool
    progress_interval: float
    needs: WorkerNeeds
    journal: JournalSettings

    @classmethod
    def of(cls, options: BatchgenOptions) -> RunRequest:
        """The request of parsed options; an `OptionError` names the flag that is missing or out of range."""
        for name in ("input", "output", "model"):
            if not getattr(options, name):
                raise OptionError(f"--{name} is needed; see batchgen-beam run --help")
        if options.limit is not None and options.limit < 1:
            raise OptionError(f"--limit must be at least 1, got {options.limit}")
        if not 0 < options.progress_interval <= MAX_PROGRESS_INTERVAL:
            raise OptionError(f"--progress-interval must be over 0 and at most {MAX_PROGRESS_INTERVAL} seconds, "
                              f"got {options.progress_interval}")
        if options.threads > MAX_THREADS:
            raise OptionError(f"--threads must be at most {MAX_THREADS}, got {options.threads}; 0 takes the "
                              "process's cores")
        return cls(
            inputs=tuple(options.input), output=options.output, model=options.model, model_cache=options.model_cache,
            model_facts=options.model_facts, chat_template=options.chat_template, engine=_engine(options),
            eos_ids=options.eos_ids, defaults=_defaults(options), columns=_columns(options), lanes=options.lanes,
            rounds=options.rounds, limit=options.limit, retry=frozenset(options.retry_failed),
            new_fingerprint=options.new_fingerprint, progress_interval=options.progress_interval,
            needs=WorkerNeeds(accelerator=options.accelerator, ram=options.worker_ram),
            journal=JournalSettings(flush_seconds=options.flush_interval, compact_seconds=options.compact_after,
                                    checkpoint_seconds=options.checkpoint_interval))


def _engine(options: BatchgenOptions) -> EngineSettings:
    names = ("dtype", "kv_dtype", "kernels", "threads", "max_rows", "step_tokens", "prefill_chunk", "attention_batch",
             "expert_batch", "kv_host_memory", "weight_memory", "max_context", "tail_processes")
    return EngineSettings(kv_memory=options.kv_memory or 0, **{name: getattr(options, name) for name in names})


def _defaults(options: BatchgenOptions) -> GenerationDefaults:
    names = ("temperature", "top_k", "top_p", "max_tokens", "seed", "logprobs")
    return GenerationDefaults(**{name: getattr(options, name) for name in names})


def _columns(options: BatchgenOptions) -> InputColumns:
    return InputColumns(id=options.id_column, prompt=options.prompt_column, messages=options.messages_column,
                        token_ids=options.token_ids_column, keep=tuple(options.keep_columns),
                        ignore=tuple(options.ignore_columns))
