"""The processes that compute the last row of an engine together: started, measured, ended.

Owns their life, the time that a row takes in one process and in all of them, and the proof on the model's own weights
that both say the same bits.  Does not know when a row moves (`engine.tail`) or how the work is dealt.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from batchgen_beam.config.base import ModelConfig
from batchgen_beam.engine.engine import Engine
from batchgen_beam.engine.partition import leading
from batchgen_beam.engine.stats import EngineFacts
from batchgen_beam.engine.tail import TailEngine
from batchgen_beam.engine.tail_rule import Tail, TailChoice, TailCost, TailRule
from batchgen_beam.errors import EngineError, OptionError
from batchgen_beam.kernels.native_set import NativeKernels
from batchgen_beam.kernels.partitioned_set import PartitionedKernels
from batchgen_beam.kernels.process_group import MeetingPlace, ProcessGroup
from batchgen_beam.models.interface import KernelSet, Model
from batchgen_beam.records import Outcome, Prompt, RowKey, SamplingParams, token_array
from batchgen_beam.settings import EngineSettings
from batchgen_beam.transforms.tail_follower import FollowerTask, inner_kernels
from batchgen_beam.weights.loader import load_model

__all__ = ["TailProcesses", "refuse_tail_processes"]

LOG = logging.getLogger(__name__)

JOIN_SECONDS = 600.0
"""Until every process has loaded its part."""

ANSWER_SECONDS = 60.0
"""A process that lets the leader wait longer within a step is lost."""

IDLE_SECONDS = 30 * 86_400.0
"""So long the others wait for their leader; they end with it in any case."""

END_SECONDS = 10.0

TRIAL_PROMPT, TRIAL_TOKENS = 32, 8
TRIAL_CONTEXT = 4

_MakeEngine = Callable[[EngineFacts], Engine]

_FOLLOWER = "from batchgen_beam.transforms.tail_follower import main; main()"

SPLIT_ON_ANY_KERNELS, SPLIT_ON_TORCH = "llama", "mixtral"
"""Model types that the processes of a tail can share."""


def refuse_tail_processes(settings: EngineSettings, config: ModelConfig) -> None:
    """`OptionError` where `--tail-processes` asks for what can't be."""
    flag = f"--tail-processes={settings.tail_processes}"
    if settings.tail_processes == 1:
        return
    if config.model_type not in (SPLIT_ON_ANY_KERNELS, SPLIT_ON_TORCH):
        raise OptionError(f"{flag}: models of type {SPLIT_ON_ANY_KERNELS} and {SPLIT_ON_TORCH} are split over "
                          f"processes, this one is {config.model_type!r}; leave the flag out")
    if config.model_type == SPLIT_ON_TORCH and settings.kernels != "torch":
        raise OptionError(f"{flag}: experts are split over processes on the torch kernels alone; give --kernels=torch, "
                          "or leave the flag out")
    if settings.weight_memory:
        raise OptionError(f"{flag}: each process keeps its part of the weights in memory; leave out --weight-memory or "
                          "the flag")


class TailProcesses:
    """The other processes of an engine on this model, and this one's way to them.  Whoever made it closes it, unless
    that failed: an `EngineError` says which process did not come.  `verdict`: what was measured, in one line.
    """

    def __init__(self, model: Path, kernels: KernelSet, settings: EngineSettings) -> None:
        path = kernels.path if isinstance(kernels, NativeKernels) else None
        threads = settings.threads if path is None else max(1, settings.threads // settings.tail_processes)
        self.settings = replace(settings, threads=threads, max_rows=1, kv_host_memory=0, prefix_sharing=False,
                                attention_batch=0, expert_batch=0)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.verdict = ""
        self._model = model
        self._leading = ExitStack()
        with ExitStack() as stack:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="batchgen-tail-", ignore_cleanup_errors=True)))
            stack.callback(self._end)
            place = MeetingPlace(folder=folder, size=settings.tail_processes, join=JOIN_SECONDS, answer=ANSWER_SECONDS)
            for rank in range(1, place.size):
                self.processes.append(_start(FollowerTask(
                    model=model, settings=self.settings, path=path, rank=rank,
                    place=replace(place, answer=IDLE_SECONDS))))
            self._group = stack.enter_context(ProcessGroup(place, 0))
            self._kernels = PartitionedKernels(inner_kernels(self.settings, path), self._group)
            self._open = stack.pop_all()

    def tail_engine(self, engine: Engine, model: Model, kernels: KernelSet, facts: EngineFacts, *, rule: TailRule,
                    clock: Callable[[], float] = time.perf_counter) -> TailEngine | None:
        """`engine`, of this model on these kernels, with these processes for its last row; None, and they have ended,
        if by the times that are measured no row would ever go there.

        `EngineError`, and they have ended too, if one could not load its part, or they do not say the bits of one.
        """
        with ExitStack() as stack:
            stack.callback(self.close)
            part = load_model(self._model, self._kernels)
            executor = self._leading.enter_context(leading(part, self._kernels, self.settings, self._group))
            together = partial(Engine, part, self._kernels, self.settings, make_executor=executor)
            cost = self._measured(partial(Engine, model, kernels, self.settings), together, facts, clock)
            far = Tail(rows=1, tokens=engine.context_limit, context=1, may_refill=False)
            gains = rule(far, cost) is TailChoice.SPLIT
            self.verdict = (
                f"tail processes: a row's step takes {1e3 * cost.here:.3g} ms in one process and "
                f"{1e3 * cost.split:.3g} ms in {self._group.size} of {self.settings.threads} threads each, a prompt "
                f"token {1e3 * cost.prefill:.3g} ms: {'last rows may go there' if gains else 'no row will, they end'}")
            LOG.info(self.verdict)
            if not gains:
                return None
            stack.pop_all()
            return TailEngine(engine, together(facts), cost, lost=self.lose, rule=rule)

    def _measured(self, alone: _MakeEngine, together: _MakeEngine, facts: EngineFacts,
                  clock: Callable[[], float]) -> TailCost:
        """Of one and the same row, which no token ends."""
        endless = replace(facts, eos_ids=frozenset())
        here, split = _Timed.of(alone(endless), clock), _Timed.of(together(endless), clock)
        if here.said != split.said:
            raise EngineError(f"--tail-processes={self._group.size}: together they say other bits than one process "
                              f"with {', '.join(f'{name} {fact}' for name, fact in self._kernels.facts().items())}; "
                              "leave the flag out")
        return TailCost(here=here.step, split=split.step, prefill=split.prefill)

    def close(self) -> None:
        """End all processes; their leader has no step under way.  Safe to repeat."""
        try:
            self._leading.close()
        except EngineError as error:
            LOG.info("the tail's processes had ended before: %s", error)
        self._open.close()

    def lose(self) -> None:
        """End all processes, one of which is lost."""
        for process in self.processes:
            process.kill()
        self.close()

    def _end(self) -> None:
        """Those that were told to end, or that their leader left, do so by themselves."""
        for process in self.processes:
            assert process.stdin is not None
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdin.close()


def _start(task: FollowerTask) -> subprocess.Popen[bytes]:
    """A process with a task: a new program, since this one has threads, out of reach of the terminal's signals."""
    search = os.pathsep.join(dict.fromkeys(sys.path))
    process = subprocess.Popen([sys.executable, "-c", _FOLLOWER], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                               start_new_session=True, env={**os.environ, "PYTHONPATH": search})
    assert process.stdin is not None
    process.stdin.write(pickle.dumps(task))
    process.stdin.flush()
    return process


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """What one row said, the least seconds of its decode steps, and the seconds of a prompt token."""

    said: tuple[list[int], bytes]
    step: float
    prefill: float

    @classmethod
    def of(cls, engine: Engine, clock: Callable[[], float]) -> _Timed:
        """On an engine in which no token ends a row; `OptionError` if its context is too short."""
        if engine.longest_row < TRIAL_CONTEXT:
            raise OptionError(f"--tail-processes needs room for {TRIAL_CONTEXT} tokens of a row, there is room for "
                              f"{engine.longest_row}; leave the flag out")
        prompt = min(TRIAL_PROMPT, engine.longest_row // 2)
        tokens = min(TRIAL_TOKENS, engine.longest_row - prompt)
        params = SamplingParams(temperature=0.0, max_tokens=tokens)
        engine.submit(Prompt(key=RowKey("trial", "0" * 64), token_ids=token_array(range(prompt)), params=params))
        times, started = [], clock()
        while engine.step():
            ended = clock()
            times.append(ended - started)
            started = ended
        (answer,) = engine.poll()
        assert isinstance(answer, Outcome), answer
        decoding = times[1 - tokens:]
        return cls(said=(list(answer.token_ids), answer.logprobs.chosen.tobytes()), step=min(decoding),
                   prefill=sum(times[: 1 - tokens]) / prompt)
