"""Laws of the comparison: it finds what the fault suite looks for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen_beam.pipelines.main import ROWS_FAILED, main
from batchgen_beam.text.fake_folder import write_fake_folder
from tests.faults.compare import differences, unbalanced
from tests.support.jobs import questions, run_flags, write_rows

ROWS = 13

Edit = Callable[[list[dict[str, Any]]], object]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished output of 12 answers and a failure."""
    folder = tmp_path_factory.mktemp("compare")
    model = write_fake_folder(folder / "model")
    rows = [*questions(ROWS - 1), {"uuid": "empty", "prompt": ""}]
    write_rows(folder / "a.parquet", rows, row_group_size=5)
    assert main(run_flags(folder / "a.parquet", folder / "out", model, "--logprobs=1")) == ROWS_FAILED
    return folder / "out"


def edited(source: Path, target: Path, edit: Edit) -> Path:
    """A copy whose first file of results is edited."""
    shutil.copytree(source, target)
    file = min((target / "results").rglob("rg-*.parquet"))
    table = pq.read_table(file)
    rows = table.to_pylist()
    edit(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), file)
    return target


def _negated_zero(rows: list[dict[str, Any]]) -> None:
    rows[2]["temperature"] = -0.0


def _another_bit(rows: list[dict[str, Any]]) -> None:
    rows[1]["logprobs"][3]["logprob"] *= 1 + 2**-23


def _another_token(rows: list[dict[str, Any]]) -> None:
    rows[0]["token_ids"][-1] += 1


def test_equal_answers_at_other_times(finished: Path, tmp_path: Path) -> None:
    """Times may differ, nothing else is told."""
    def later(rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["generate_seconds"] += 1

    assert differences(finished, edited(finished, tmp_path / "out", later)) == []
    assert unbalanced(finished, ROWS) == []


@pytest.mark.parametrize(("edit", "told"), [
    (lambda rows: rows.pop(), ["lost: "]),
    (lambda rows: rows.append(rows[-1]), ["2 times: "]),
    (lambda rows: rows.append({**rows[0], "uuid": "other"}), ["strange: "]),
    (lambda rows: rows.reverse(), ["rows stand in another order"]),
    (_negated_zero, ["temperature 0x0.0p+0 -> -0x0.0p+0"]),
    (_another_bit, ["logprobs "]),
    (_another_token, ["token_ids "]),
])
def test_what_differs_is_told(finished: Path, tmp_path: Path, edit: Edit, told: list[str]) -> None:
    """One line each: lost, doubled, strange, moved, and one bit of a float32."""
    lines = differences(finished, edited(finished, tmp_path / "out", edit))
    assert len(lines) == len(told)
    assert all(part in line.replace("'", "") for part, line in zip(told, lines, strict=True))


@pytest.mark.parametrize("name", ["rows", "results", "failed", "conflicts", "completion_tokens"])
def test_counts_that_do_not_balance_are_told(finished: Path, tmp_path: Path, name: str) -> None:
    """Each count of the report is compared with what is published."""
    shutil.copytree(finished, tmp_path / "out")
    report = json.loads((finished / "run.json").read_text())
    report["counts"][name] += 1
    (tmp_path / "out" / "run.json").write_text(json.dumps(report))
    assert len(unbalanced(tmp_path / "out", ROWS)) == 1
