"""The simulated engine takes the steps of the real one, and a simulated job ends every row once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from batchgen_beam.records import Outcome
from benchmarks.round_simulation import Choice, Cluster, Cost, Worker, first_lanes, make_rows, run_job
from benchmarks.simulated_engine import SimulatedEngine, SimulatedRow, StepCosts
from tests.engine.rigs import engine, fake_model, finish, kv_bytes, prompt

COSTS = StepCosts(floor=0.02, token=4.5e-4, page=1.5e-4, prefill_page=2e-5)


def cluster(**values: float) -> Cluster:
    """Three small workers of two slots, four lanes for each."""
    given = {"rows": 600, "median_tokens": 8, "context": 1024, "workers": 3, "slots": 2, "lanes": 12, "capacity": 8,
             "pages_per_row": 8, "skew": 0.3, "journal_seconds": 0.5, "barrier_seconds": 5.0}
    return Cluster(costs=COSTS, **{**given, **values})


@pytest.mark.parametrize(("pages", "seed"), [(200, 0), (14, 1), (12, 2)])
def test_simulated_engine_takes_the_steps_of_the_real_one(pages: int, seed: int) -> None:
    """Steps, rows in steps, evictions and prefilled tokens agree, with plenty of pages and with too few."""
    draw = random.Random(seed)
    lengths = [(draw.randrange(1, 150), draw.randrange(1, 250)) for _ in range(20)]
    model = fake_model()
    real = engine(model, kv_memory=kv_bytes(model, pages), prefix_sharing=False, longest_first=False)
    simulated = SimulatedEngine(capacity=8, pages=pages, costs=COSTS, step_tokens=256, prefill_chunk=64)
    for index, (length, answer) in enumerate(lengths):
        real.submit(prompt(f"{index}", length, max_tokens=answer))
        simulated.submit(SimulatedRow(key=f"{index}", prompt=length, context=length, target=length + answer))
    answers = finish(real)
    assert all(isinstance(answer, Outcome) for answer in answers.values())
    ended = []
    while simulated.unanswered:
        ended += simulated.step(float("inf"))
    stats = real.stats()
    assert sorted(row.key for row in ended) == sorted(answers)
    assert ((simulated.steps, simulated.row_steps, simulated.evictions, simulated.prefilled)
            == (stats.steps, stats.row_steps, stats.evictions, stats.prefilled_tokens))
    assert (stats.evictions > 0) == (pages < 100)


def test_rows_that_leave_a_worker_go_on_where_they_were() -> None:
    """A worker's rows either end or leave at the threshold, and none is in both; who left has not ended."""
    job = cluster()
    draw = np.random.default_rng(3)
    rows = make_rows(job, draw)
    worker = Worker(job, 1.0)
    left = worker.run(first_lanes(job, rows, draw), 0.0, 0.5)
    assert 0 < len(left) <= job.lanes * 0.5 * job.capacity
    assert {row.key for row in rows if row.context < row.target} == {row.key for row in left}
    assert worker.engine.unanswered == 0
    assert worker.run([left], 100.0, None) == []
    assert all(row.context == row.target for row in rows)


def test_a_job_costs_the_same_whenever_it_is_simulated() -> None:
    """The seed decides; rows are sampled alike for every choice, and more rounds move more rows."""
    choices = [Choice(rounds=rounds, tail=0.5) for rounds in (1, 2, 3)]
    costs = [run_job(cluster(), choice, seed=1) for choice in choices]
    assert costs == [run_job(cluster(), choice, seed=1) for choice in choices]
    one, two, three = costs
    assert one.moved == 0 < two.moved <= three.moved
    assert isinstance(one, Cost)
    assert one.completion > 0.0
