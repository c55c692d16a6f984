"""Faults of hosting an engine in a pipeline that users of other systems reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import apache_beam as beam
import pytest
from apache_beam.metrics import MetricsFilter
from apache_beam.runners.runner import PipelineResult
from apache_beam.testing.util import assert_that

from batchgen_beam.errors import ErrorCode
from batchgen_beam.pipelines.main import ROWS_FAILED, main
from batchgen_beam.records import Answer, Failure, InputRow
from batchgen_beam.text.fake_folder import write_fake_folder
from batchgen_beam.transforms import metrics
from batchgen_beam.transforms.generate import Generate, Round
from batchgen_beam.transforms.host import HostHandle
from batchgen_beam.transforms.lanes import ToLanes
from batchgen_beam.transforms.prepare import Prepare
from tests.support.hosting import host_handle, input_row, make_prompt
from tests.support.jobs import published, questions, run_flags, write_rows

pytestmark = pytest.mark.timeout(120)


def test_case_58_one_load_whatever_the_runner_rebuilds(tmp_path: Path) -> None:
    """Case 58: several steps, threads and bundles, and DoFns that are set up anew, share one engine, loaded once."""
    handle = host_handle(write_fake_folder(tmp_path / "fake"))
    workers = ["--direct_num_workers=3", "--direct_running_mode=multi_threading"]
    pipeline = beam.Pipeline(runner="FnApiRunner", argv=workers)
    for name in ("one", "two"):
        prompts = [make_prompt(index, seed=len(name + str(index))) for index in range(40)]
        rows = pipeline | f"{name}" >> beam.Create(prompts) | f"spread {name}" >> beam.Reshuffle()
        _ = rows | f"lanes {name}" >> ToLanes(3) | f"generate {name}" >> Generate(handle, Round())
    result = pipeline.run()
    result.wait_until_finish()
    wanted = MetricsFilter().with_namespace(metrics.NAMESPACE).with_name(metrics.LOAD_MSECS)
    loads = result.metrics().query(wanted)["distributions"]
    assert sum(metric.committed.count for metric in loads) == 1
    assert handle.acquire().loads == 1


def test_case_57_the_failure_domain_is_one_row(tmp_path: Path) -> None:
    """Case 57: bad rows in the middle of a chunk, also such as only the engine can refuse, fail alone."""
    handle = host_handle(write_fake_folder(tmp_path / "fake"))
    rows = [input_row(index, prompt=f"question {index}") for index in range(30)]
    rows[7] = input_row(7, token_ids=[1, 2, 100_000])
    rows[11] = input_row(11, prompt="")
    rows[19] = input_row(19, prompt="x", top_p=3.0)

    def check(answers: list[tuple[str, Answer]]) -> None:
        assert len({key for key, _ in answers}) == len(answers) == 30
        failed = {answer.key.uuid: answer.code for _, answer in answers if isinstance(answer, Failure)}
        assert failed == {"row-7": ErrorCode.INVALID_ROW, "row-11": ErrorCode.EMPTY_PROMPT,
                          "row-19": ErrorCode.INVALID_PARAMETER}

    _answer_all(rows, handle, check)


def test_case_10_one_outcome_for_each_id(tmp_path: Path) -> None:
    """Case 10: an over-long prompt appears once, as a failure, and the number of outcomes is that of the rows."""
    write_rows(tmp_path / "a.parquet", [*questions(9), {"uuid": "long", "prompt": "x" * 5000}])
    output = tmp_path / "out"
    assert main(run_flags(tmp_path / "a.parquet", output, write_fake_folder(tmp_path / "fake"))) == ROWS_FAILED
    ids = [row["uuid"] for kind in ("results", "failures") for row in published(output, kind)]
    assert sorted(ids) == sorted([*(f"id-{index}" for index in range(9)), "long"])
    [failure] = published(output, "failures")
    assert failure["code"] == "PROMPT_TOO_LONG"
    assert "5001 tokens" in failure["message"]
    assert "1024" in failure["message"]


def test_case_59_answers_stay_with_their_prompts(tmp_path: Path) -> None:
    """Case 59: rows that end in the reverse of their order, in several lanes, still answer their own prompt."""
    model = write_fake_folder(tmp_path / "fake", eos_every=0)
    rows = [{**row, "max_tokens": 40 - index} for index, row in enumerate(questions(40))]
    write_rows(tmp_path / "a.parquet", rows)
    assert main(run_flags(tmp_path / "a.parquet", tmp_path / "out", model, "--lanes=3", "--keep-columns=prompt")) == 0
    results = published(tmp_path / "out")
    assert [row["completion_tokens"] for row in results] == [row["max_tokens"] for row in rows]
    assert [row["prompt"] for row in results] == [row["prompt"] for row in rows]
    assert [row["prompt_tokens"] for row in results] == [1 + len(row["prompt"]) for row in rows]


def test_case_61_totals_are_made_of_rows(tmp_path: Path) -> None:
    """Case 61: a failed row leaves the totals of the others whole; without retries the metrics are those totals."""
    handle = host_handle(write_fake_folder(tmp_path / "fake"))
    rows = [input_row(index, prompt="" if index % 5 == 0 else f"question {index}") for index in range(20)]
    result = _answer_all(rows, handle, lambda answers: None)
    counters = {metric.key.metric.name: metric.committed
                for metric in result.metrics().query(MetricsFilter().with_namespace(metrics.NAMESPACE))["counters"]}
    assert counters[metrics.ROWS_ANSWERED] == 16
    assert counters[metrics.ROWS_FAILED] == counters["rows_failed_empty_prompt"] == 4


def _answer_all(rows: list[InputRow], handle: HostHandle,
                check: Callable[[list[tuple[str, Answer]]], None]) -> PipelineResult:
    pipeline = beam.Pipeline(runner="FnApiRunner")
    prepared = pipeline | beam.Create(rows) | Prepare(handle)
    generated = prepared.prompts | ToLanes(2) | Generate(handle, Round())
    assert_that((prepared.failures, generated.answers) | beam.Flatten(), check)
    result = pipeline.run()
    result.wait_until_finish()
    return result
