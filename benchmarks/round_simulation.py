"""What rounds are worth: batch completion time of a long-tailed job, simulated with the real scheduler and planner.

    python -m benchmarks.round_simulation [--rows N] [--tails 0.25,0.5] [--seeds N] ...

Output lengths are log-normal with P99/P95 = 3.8, cut off by the context limit.  Rows go to lanes by hash, lanes to
the slots of the workers; a slot runs its lanes one after another, as Flink's batch mode does, and all slots of a worker
feed one engine, which decides with `scheduler.schedule`.  Workers differ in speed.  When a lane's rows are all
submitted and the engine has at most tail x capacity rows left, the lane's rows leave; when every lane of the round has
ended, `round_plan` spreads them over fewer lanes, one for each slot, and they are prefilled again.  A lane's end waits
for the journal, a round's end for the slowest worker and the barrier.

The default costs of a step are those of SmolLM2-135M with the torch kernel set (bfloat16) on two cores: about 20 ms for
one row, and for more tokens and pages what this set's steps of 1, 32 and 128 rows of 120 tokens, and of one row of
2,000, cost in proportion to that.  An accelerator: --floor-ms 10 --token-ms 0.03 --page-ms 0.002 --prefill-page-ms
0.002.  Prints one line for each choice: the median over the seeds, and the least and greatest; `gain` is the share of
the time of one round that is saved.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, median

import numpy as np

from batchgen_beam.engine.round_plan import expected_remaining, plan_round
from benchmarks.simulated_engine import SimulatedEngine, SimulatedRow, StepCosts

QUANTILE_RATIO = 3.8
SIGMA = math.log(QUANTILE_RATIO) / (NormalDist().inv_cdf(0.99) - NormalDist().inv_cdf(0.95))
CHUNK_ROWS = 256
QUEUE_FACTOR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The job and the machines; seconds and tokens."""

    rows: int
    median_tokens: int
    context: int
    workers: int
    slots: int
    lanes: int
    capacity: int
    pages_per_row: int
    skew: float
    costs: StepCosts
    journal_seconds: float
    barrier_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Rounds, and the tail threshold of the first; each later one's is a quarter of the one before."""

    rounds: int
    tail: float

    def tail_of(self, index: int) -> float | None:
        """The threshold of a round, None for the last, which drains."""
        return None if index == self.rounds - 1 else self.tail / 4**index


@dataclass(slots=True, kw_only=True)
class Cost:
    """What a job took: `completion` from its start to its last row, `busy` summed over the workers."""

    completion: float = 0.0
    busy: float = 0.0
    moved: int = 0
    prefilled_again: int = 0
    fill: float = 0.0


Lanes = list[list[SimulatedRow]]


@dataclass(slots=True)
class _Slot:
    """A worker slot: lanes to come, and the one that it runs (`waiting` rows to submit, `inside` in the engine)."""

    lanes: Lanes
    waiting: list[SimulatedRow] = field(default_factory=list)
    inside: set[str] = field(default_factory=set)
    busy: bool = False
    ready_at: float = 0.0


class Worker:
    """One engine and the slots that feed it."""

    def __init__(self, cluster: Cluster, slowness: float) -> None:
        self._cluster = cluster
        self.engine = SimulatedEngine(capacity=cluster.capacity, pages=cluster.capacity * cluster.pages_per_row,
                                      costs=cluster.costs, slowness=slowness)

    def run(self, lanes: Lanes, start: float, tail: float | None) -> list[SimulatedRow]:
        """Run the lanes from `start` on; gives the rows that left unfinished.  The engine's clock tells the end."""
        engine = self.engine
        engine.clock = start
        slots = [_Slot(lanes[index :: self._cluster.slots], ready_at=start) for index in range(self._cluster.slots)]
        left: list[SimulatedRow] = []
        while True:
            self._feed(slots)
            left += self._end_lanes(slots, tail)
            coming = [slot.ready_at for slot in slots if not slot.busy and slot.lanes]
            if engine.unanswered:
                ended = {row.key for row in engine.step(min(coming, default=math.inf))}
                for slot in slots:
                    slot.inside -= ended
            elif coming:
                engine.clock = max(engine.clock, min(coming))
            elif not any(slot.waiting for slot in slots):
                engine.clock = max(engine.clock, *(slot.ready_at for slot in slots))
                return left

    def _feed(self, slots: Sequence[_Slot]) -> None:
        """Open lanes, and submit chunks in turn until the engine's queue is long enough."""
        for slot in slots:
            if not slot.busy and slot.lanes and slot.ready_at <= self.engine.clock:
                slot.waiting, slot.busy = slot.lanes.pop(0), True
        while any(slot.waiting for slot in slots) and self.engine.queued < QUEUE_FACTOR * self.engine.capacity:
            for slot in slots:
                chunk, slot.waiting = slot.waiting[:CHUNK_ROWS], slot.waiting[CHUNK_ROWS:]
                slot.inside.update(row.key for row in chunk)
                for row in chunk:
                    self.engine.submit(row)

    def _end_lanes(self, slots: Sequence[_Slot], tail: float | None) -> Iterator[SimulatedRow]:
        """Lanes without rows end; at the tail threshold the rest of an exhausted lane leaves."""
        thin = tail is not None and self.engine.unanswered <= tail * self.engine.capacity
        for slot in slots:
            if slot.busy and not slot.waiting and (thin or not slot.inside):
                yield from self.engine.suspend(slot.inside)
                slot.inside = set()
                slot.busy, slot.ready_at = False, self.engine.clock + self._cluster.journal_seconds


def make_rows(cluster: Cluster, draw: np.random.Generator) -> list[SimulatedRow]:
    """Rows with prompts of 20 to 300 tokens and log-normal answers."""
    prompts = draw.integers(20, 300, cluster.rows)
    lengths = np.maximum(1, draw.lognormal(math.log(cluster.median_tokens), SIGMA, cluster.rows)).astype(int)
    targets = np.minimum(prompts + lengths, cluster.context)
    return [SimulatedRow(key=f"{index:07d}", prompt=int(prompt), context=int(prompt), target=int(target))
            for index, (prompt, target) in enumerate(zip(prompts, targets, strict=True))]


def first_lanes(cluster: Cluster, rows: Sequence[SimulatedRow], draw: np.random.Generator) -> Lanes:
    """Rows by hash: uneven lanes."""
    lanes: Lanes = [[] for _ in range(cluster.lanes)]
    for row, lane in zip(rows, draw.integers(0, cluster.lanes, len(rows)), strict=True):
        lanes[lane].append(row)
    return lanes


def later_lanes(cluster: Cluster, rows: Sequence[SimulatedRow]) -> Lanes:
    """What the planner makes of the rows that left: one lane for each slot, the longest row of a lane first."""
    expected = {row.key: expected_remaining(prompt=row.prompt, generated=row.context - row.prompt, max_tokens=None,
                                            context_limit=cluster.context) for row in rows}
    lanes: Lanes = [[] for _ in range(cluster.workers * cluster.slots)]
    plan = plan_round(expected.items(), len(lanes))
    for row in sorted(rows, key=lambda row: (-expected[row.key], row.key)):
        lanes[plan[row.key]].append(row)
    return lanes


def run_job(cluster: Cluster, choice: Choice, seed: int) -> Cost:
    """One job from its first row to its last."""
    draw = np.random.default_rng(seed)
    rows = make_rows(cluster, draw)
    lanes = first_lanes(cluster, rows, draw)
    workers = [Worker(cluster, slowness) for slowness in draw.uniform(1.0, 1.0 + cluster.skew, cluster.workers)]
    cost = Cost()
    for index in range(choice.rounds):
        left: list[SimulatedRow] = []
        for number, worker in enumerate(workers):
            left += worker.run(lanes[number :: cluster.workers], cost.completion, choice.tail_of(index))
        cost.completion = max(worker.engine.clock for worker in workers)
        cost.moved += len(left)
        cost.prefilled_again += sum(row.context for row in left)
        if not left:
            break
        cost.completion += cluster.barrier_seconds
        lanes = later_lanes(cluster, left)
    cost.busy = sum(worker.engine.busy for worker in workers)
    cost.fill = (sum(worker.engine.row_steps for worker in workers)
                 / sum(worker.engine.steps for worker in workers) / cluster.capacity)
    return cost


def spread(values: Sequence[float], form: str = "{:,.0f}") -> str:
    """Median, least and greatest."""
    return "{} ({} - {})".format(*(form.format(value) for value in (median(values), min(values), max(values))))


def table(cluster: Cluster, choices: Sequence[Choice], seeds: int) -> Iterator[str]:
    """One line for each choice."""
    yield (f"{'rounds':>6} {'tail':>6} {'completion, s':>28} {'busy worker-seconds':>34} {'gain':>22} {'moved':>7} "
           f"{'fill':>5}")
    alone: list[Cost] = []
    for choice in choices:
        costs = [run_job(cluster, choice, seed) for seed in range(seeds)]
        alone = alone or costs
        gains = [1 - cost.completion / one.completion for cost, one in zip(costs, alone, strict=True)]
        yield (f"{choice.rounds:>6} {choice.tail if choice.rounds > 1 else '-':>6} "
               f"{spread([cost.completion for cost in costs]):>28} {spread([cost.busy for cost in costs]):>34} "
               f"{spread(gains, '{:.0%}'):>22} {median(cost.moved for cost in costs):>7.0f} "
               f"{median(cost.fill for cost in costs):>5.2f}")


def parse() -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--median-tokens", type=int, default=32)
    parser.add_argument("--context", type=int, default=8192, help="SmolLM2's")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--slots", type=int, default=2, help="of each worker")
    parser.add_argument("--lanes", type=int, default=32)
    parser.add_argument("--capacity", type=int, default=64)
    parser.add_argument("--pages-per-row", type=int, default=24)
    parser.add_argument("--skew", type=float, default=0.3, help="the slowest worker takes up to this much longer")
    parser.add_argument("--floor-ms", type=float, default=20.0)
    parser.add_argument("--token-ms", type=float, default=0.45)
    parser.add_argument("--page-ms", type=float, default=0.15)
    parser.add_argument("--prefill-page-ms", type=float, default=0.02)
    parser.add_argument("--journal-seconds", type=float, default=0.5)
    parser.add_argument("--barrier-seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3, help="at most")
    parser.add_argument("--tails", default="0.25,0.5,1.0")
    parser.add_argument("--seeds", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    """Simulate, print."""
    args = parse()
    names = Cluster.__dataclass_fields__.keys() - {"costs"}
    costs = StepCosts(floor=args.floor_ms / 1e3, token=args.token_ms / 1e3, page=args.page_ms / 1e3,
                      prefill_page=args.prefill_page_ms / 1e3)
    cluster = Cluster(costs=costs, **{name: getattr(args, name) for name in names})
    choices = [Choice(rounds=1, tail=0.0)]
    choices += [Choice(rounds=rounds, tail=float(tail)) for rounds in range(2, args.rounds + 1)
                for tail in args.tails.split(",")]
    started = time.process_time()
    print(cluster)
    for line in table(cluster, choices, args.seeds):
        print(line, flush=True)
    print(f"simulated in {time.process_time() - started:.0f} s of processor time")


if __name__ == "__main__":
    main()
