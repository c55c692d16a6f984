"""The engine: submit rows, step, collect answers.

One `step` is: plan, apply the plan, one forward pass, sample, visit the rows that reached an event.  The pure scheduler
decides, `LiveRows` carries out, the executor computes.  Knows token ids only; not threads, text, files or Beam.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields

import numpy as np

from batchgen_beam.engine.admission import AdmissionQueue
from batchgen_beam.engine.batch import PackedBatch, pack
from batchgen_beam.engine.budget import page_budget
from batchgen_beam.engine.executor import Executor, MakeExecutor
from batchgen_beam.engine.kv_pool import KVPool
from batchgen_beam.engine.live_rows import LiveRows
from batchgen_beam.engine.primitives import SubBatching
from batchgen_beam.engine.sampler import choose
from batchgen_beam.engine.scheduler import Plan, PrefillChunk, Schedule, Snapshot, schedule
from batchgen_beam.engine.sequence import Sequence as RowSequence
from batchgen_beam.engine.sequence import Status, Wish
from batchgen_beam.engine.slots import Ints, SlotTable
from batchgen_beam.engine.stats import Counters, EngineFacts, EngineStats
from batchgen_beam.errors import ErrorCode, RowError
from batchgen_beam.models.interface import KernelSet, Model
from batchgen_beam.records import Answer, ContinuationRecord, EngineRow, Failure, Outcome, Prompt
from batchgen_beam.settings import EngineSettings

__all__ = ["CHECKPOINT_GROWTH", "Engine"]

CHECKPOINT_GROWTH = 0.25
"""A running row's record is renewed once its answer has grown by this share."""


class Engine:
    """Sequences, their pages and a model.  Not safe for several threads: the `Driver` owns it."""

    def __init__(self, model: Model, kernels: KernelSet, settings: EngineSettings, facts: EngineFacts, *,
                 schedule: Schedule = schedule, clock: Callable[[], float] = time.monotonic,
                 make_executor: MakeExecutor = Executor) -> None:
        """`OptionError` if the KV memory does not hold one page of each cache group.

        `context_limit` (tokens) is the model's or the settings', whichever is less; `longest_row` is the greatest
        context that the pool holds; `token_bytes` is the KV of a token.
        """
        if kernels.recompute != "prefill":
            raise ValueError(f"kernel set {kernels.name!r} makes lost pages again by {kernels.recompute!r}; "
                             f"this engine re-prefills, which would change bits")
        budget = page_budget(model, settings)
        self.settings = settings
        self.context_limit = budget.context_limit
        self.longest_row = budget.longest_row
        self.token_bytes = budget.token_bytes
        self._facts = facts
        self._vocabulary = model.vocab_size
        self._kernels = kernels
        self._executor = make_executor(model, kernels, budget, SubBatching.of(settings))
        self._pool = KVPool(budget.device, budget.host, share=settings.prefix_sharing)
        self._table = SlotTable(settings.max_rows, self._pool.groups, facts.eos_ids, model.vocab_size)
        self._live = LiveRows(self._pool, self._table, self._executor)
        self._schedule = schedule
        self._clock = clock
        self._queue = AdmissionQueue(longest_first=settings.longest_first, by_prefix=self._pool.shares)
        self._answers: list[Answer] = []
        self._next_id = 0
        self._changed = True
        self._count = Counters()
        self._first_row_at: float | None = None

    # In and out

    def submit(self, row: EngineRow) -> None:
        """Queue a row.  One that can never run becomes its failure at once.

        A record of another print can't go on with the same bits: its row starts over, and `restarts` counts it.
        """
        foreign = None if isinstance(row, Prompt) or not row.generated_ids else self._foreign_print(row)
        if foreign is not None:
            self._count.restarts[foreign] = self._count.restarts.get(foreign, 0) + 1
        try:
            if isinstance(row, Prompt):
                self._begin(row)
            elif foreign is not None or not row.generated_ids:
                self._begin(row.prompt)
            else:
                self.resume(row)
        except RowError as error:
            self._answer(Failure(key=row.key, code=error.code, message=error.message))

    def _begin(self, prompt: Prompt) -> None:
        self._enqueue(RowSequence(self._next_id, prompt, limit=self._limit(prompt), now=self._clock(),
                                  content_print=self._facts.content_print, numeric_print=self._facts.numeric_print))

    def resume(self, record: ContinuationRecord) -> None:
        """Queue a suspended row; it goes on with the same bits.

        `ValueError` for a record of another print, `RowError` if the row can't run here.
        """
        foreign = self._foreign_print(record)
        if foreign is not None:
            raise ValueError(f"continuation of {foreign} {getattr(record, foreign)!r} can't go on under "
                             f"{getattr(self._facts, foreign)!r}")
        row = RowSequence.resume(self._next_id, record, limit=self._limit(record.prompt), now=self._clock())
        self._enqueue(row)
        self._count.resumed_rows += 1

    def _foreign_print(self, record: ContinuationRecord) -> str | None:
        """Which of the prints differs from this engine's."""
        return next((name for name in ("content_print", "numeric_print")
                     if getattr(record, name) != getattr(self._facts, name)), None)

    def _enqueue(self, row: RowSequence) -> None:
        if self._first_row_at is None:
            self._first_row_at = self._clock()
        row.advance()
        self._queue.add(row)
        self._changed = True

    def _limit(self, prompt: Prompt) -> int:
        """The greatest context that the row may reach; `RowError` if it can't run."""
        length = len(prompt.token_ids)
        if length >= self.context_limit:
            raise RowError(ErrorCode.PROMPT_TOO_LONG,
                           f"the prompt has {length} tokens; the context limit is {self.context_limit} "
                           f"and one place is needed for the answer")
        least, most = min(prompt.token_ids), max(prompt.token_ids)
        if least < 0 or most >= self._vocabulary:
            raise RowError(ErrorCode.INVALID_ROW, f"token ids {least}..{most} are outside 0..{self._vocabulary - 1}")
        limit = min(self.context_limit, length + (prompt.params.max_tokens or self.context_limit))
        if limit > self.longest_row:
            raise RowError(ErrorCode.CAPACITY_EXCEEDED,
                           f"prompt and answer may reach {limit} tokens, the KV memory holds {self.longest_row} of one "
                           f"row; lower max_tokens or raise --kv-memory")
        return limit

    def poll(self) -> list[Answer]:
        """Answers since the last call, in the order in which they were found."""
        answers, self._answers = self._answers, []
        return answers

    def suspend_all(self) -> list[ContinuationRecord]:
        """Every unanswered row in its portable form, oldest first; the engine is empty afterwards."""
        return self.suspend({row.key.text for row in (*self._live.rows.values(), *self._queue)})

    def suspend(self, keys: Iterable[str]) -> list[ContinuationRecord]:
        """The unanswered rows with these row key texts in their portable form, oldest first; they leave the engine."""
        wanted = set(keys)
        admitted = [row for _, row in sorted(self._live.rows.items()) if row.key.text in wanted]
        queued = self._queue.take(wanted)
        for row in admitted:
            if row.seq_id in self._live.slot_of:
                self._live.sync(row)
        records = [row.suspend() for row in (*admitted, *queued)]
        for row in admitted:
            self._live.forget(row)
        self._changed = True
        return records

    def checkpoint(self, seconds: float, *, growth: float = CHECKPOINT_GROWTH) -> list[ContinuationRecord]:
        """Records of running rows whose last one is `seconds` old and that have generated `growth` more since."""
        now = self._clock()
        due = [row for row in self._live.rows.values() if now - row.recorded_at >= seconds]
        records = []
        for row in due:
            if row.seq_id in self._live.slot_of:
                self._live.sync(row)
            if len(row.generated) > (1 + growth) * row.recorded_tokens:
                records.append(row.record())
                row.recorded_at, row.recorded_tokens = now, len(row.generated)
        return records

    # The loop

    def step(self) -> bool:
        """One forward pass over all running rows and the planned prompt chunks; False when there is nothing to do."""
        if not (self._live.rows or self._queue):
            return False
        assert self._first_row_at is not None
        started = self._clock()
        plan = self._plan()
        self._apply(plan)
        batch = pack(self._table, self._live.slot_of, plan.prefill)
        if len(batch.slots_R):
            self._visit(batch, plan.prefill, self._run(batch))
        self._count.steps += 1
        self._count.row_steps += len(batch.slots_R)
        ended = self._clock()
        self._count.busy_seconds += ended - started
        self._count.span_seconds = ended - self._first_row_at
        return True

    def _plan(self) -> Plan:
        """Nothing new can be decided while no row has met an event and none has come."""
        if not self._changed:
            return Plan()
        self._changed = False
        rows, queue, followers = self._live.look(self._next_in_line())
        return self._schedule(Snapshot(
            rows=rows,
            queue=queue,
            groups=self._pool.groups,
            free=self._pool.free,
            free_host=self._pool.free_host,
            free_slots=self._table.free,
            step_tokens=self.settings.step_tokens,
            prefill_chunk=self.settings.prefill_chunk,
            prefix_users=self._pool.prefix_users,
            followers=followers,
        ))

    def _next_in_line(self) -> list[RowSequence]:
        """Rows of the queue that would find a slot.  Ids tell the order of admission, so they get theirs now."""
        rows = self._queue.first(self._table.free)
        for row in rows:
            row.seq_id = self._next_id
            self._next_id += 1
        return rows

    def _apply(self, plan: Plan) -> None:
        rows = self._live.rows
        for seq_id in plan.hold:
            self._live.hold(rows[seq_id])
        for seq_id in plan.evict:
            self._live.evict(rows[seq_id])
        queued = {row.seq_id: row for row in self._queue.first(len(plan.admit))}
        entering = [rows.get(seq_id) or queued[seq_id] for seq_id in plan.admit]
        self._live.read_prefixes(entering)
        self._live.extend([rows[seq_id] for seq_id in plan.extend])
        self._live.restore([rows[seq_id] for seq_id in plan.restore])
        self._live.admit(entering)
        for row in self._queue.pop(sum(seq_id in queued for seq_id in plan.admit)):
            row.started = self._clock()
        self._count.holds += len(plan.hold)
        self._count.evictions += len(plan.evict)
        self._changed |= bool(plan.hold or plan.evict)

    def _run(self, batch: PackedBatch) -> Ints:
        """One token for every row whose context is computed; returns the slots whose logits are not finite."""
        slots, eligible = batch.slots_R[batch.sampled_R], self._facts.text_vocabulary
        lines = self._live.lines.take(slots)
        scores = self._executor.forward(batch, lines.whole, eligible)
        if not len(slots):
            return slots
        sampled = choose(self._kernels, scores, lines, self._table.context[slots], eligible)
        self._table.record(slots, sampled.ids_W, sampled.logprobs_W, sampled.top_ids_WK, sampled.top_logprobs_WK)
        self._count.generated_tokens += len(slots) - int(sampled.bad_W.sum())
        return slots[sampled.bad_W]

    # Events

    def _visit(self, batch: PackedBatch, chunks: Sequence[PrefillChunk], bad: Ints) -> None:
        """Answer bad rows, then advance every row whose prefill went on, whose page is full, or that ended."""
        for slot in bad:
            row = self._row(slot)
            message = "the model's logits are not finite"
            self._answer(Failure(key=row.key, code=ErrorCode.NUMERIC_ERROR, message=message))
            row.become(Status.FAILED)
            self._live.forget(row)
            self._changed = True
        for chunk in chunks:
            if (row_or_none := self._live.rows.get(chunk.seq_id)) is not None:
                self._advance_prefill(row_or_none, chunk)
        decoded = batch.slots_R[: len(batch.slots_R) - len(chunks)]
        for slot in self._table.due(np.setdiff1d(decoded, bad)):
            self._advance(self._row(slot))

    def _advance_prefill(self, row: RowSequence, chunk: PrefillChunk) -> None:
        recomputed, resumed = row.recomputed, row.resumed
        row.computed_to(chunk.start + chunk.count)
        self._count.prefilled_tokens += chunk.count
        self._count.recomputed_tokens += row.recomputed - recomputed
        self._count.resumed_tokens += row.resumed - resumed
        self._live.publish(row)
        self._advance(row)

    def _advance(self, row: RowSequence) -> None:
        self._changed = True
        self._count.events += 1
        if self._live.visit(row) is Wish.DONE:
            self._answer(self._outcome(row))
            row.become(Status.DONE)
            self._live.forget(row)

    def _row(self, slot: int) -> RowSequence:
        row = self._table.sequences[slot]
        assert row is not None, slot
        return row

    def _outcome(self, row: RowSequence) -> Outcome:
        assert row.finish_reason is not None
        return Outcome(
            key=row.key, choice_index=row.choice_index, token_ids=row.generated, finish_reason=row.finish_reason,
            prompt_tokens=len(row.prompt_ids), cached_tokens=row.cached, logprobs=row.logprobs, params=row.params,
            content_print=row.content_print, numeric_print=row.numeric_print,
            queue_seconds=row.started - row.submitted, generate_seconds=self._clock() - row.started)

    def _answer(self, answer: Answer) -> None:
        self._answers.append(answer)
        if isinstance(answer, Failure):
            self._count.failures[answer.code] = self._count.failures.get(answer.code, 0) + 1
        else:
            self._count.rows_done += 1
            self._count.prompt_tokens += answer.prompt_tokens
            self._count.cached_tokens += answer.cached_tokens

    # What there is

    def last_row(self) -> tuple[RowSequence, int] | None:
        """The only row that there is, while it decodes, and its context (tokens)."""
        if len(self._live.rows) != 1 or len(self._queue):
            return None
        (row,) = self._live.rows.values()
        return (row, int(self._table.context[self._live.slot_of[row.seq_id]])) if row.status is Status.DECODE else None

    def stats(self) -> EngineStats:
        """A reading of the sums and of what is under way."""
        sums = {item.name: getattr(self._count, item.name) for item in fields(Counters)}
        return EngineStats(
            **{**sums, "failures": dict(self._count.failures), "restarts": dict(self._count.restarts)},
            queued=len(self._queue),
            active=len(self._live.slot_of),
            waiting=len(self._live.rows) - len(self._live.slot_of),
            capacity=self.settings.max_rows,
            pages_used=sum(self._pool.usable) - sum(self._pool.free),
            pages_total=sum(self._pool.usable),
            forward_calls=self._executor.forward_calls,
        )

    def check_integrity(self) -> None:
        """Pages, slots, rows and queue agree; nothing is leaked."""
        self._live.check_integrity()
        assert all(row.status is Status.QUEUED for row in self._queue)
