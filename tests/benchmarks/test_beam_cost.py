"""What Beam costs, on a model that answers without weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchgen_beam.text.fake_folder import END_ID, write_fake_folder
from benchmarks.beam_cost import main, report

pytestmark = pytest.mark.timeout(120)
FLAGS = ["--max-rows=4", "--dtype=float32", "--threads=1", "--kv-memory=4MiB"]


def workload(folder: Path) -> Path:
    """Seven rows of 30 to 36 tokens."""
    rows = [{"uuid": f"row-{i}", "prompt_ids": [40 + i] * (5 + i), "max_tokens": 30 + i} for i in range(7)]
    place = folder / "workload.jsonl"
    place.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return place


def test_the_cost_is_the_share_of_the_span_outside_steps() -> None:
    """40 seconds, 38 of them in steps, cost a twentieth; 100 steps of three rows each in the mean fill 3/4 of four."""
    counted = {"span_seconds": 40.0, "busy_seconds": 38.0, "rows_done": 7, "generated_tokens": 300, "steps": 100,
               "row_steps": 300, "evictions": 5}
    assert report(counted, 55.5, 4) == {"cost": 0.05, "span_seconds": 40.0, "step_seconds": 38.0, "wall_seconds": 55.5,
                                        "rows": 7, "output_tokens": 300, "steps": 100, "fill": 0.75}


def test_a_run_is_counted_by_its_own_engine(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Only the first rows where so many are asked for; all figures are those of one run."""
    model = write_fake_folder(tmp_path / "model", eos_every=0)
    main(["--model", str(model), "--workload", str(workload(tmp_path)), "--rows=6", "--eos-id=7", *FLAGS])
    found = json.loads(capfd.readouterr().out)
    assert (found["rows"], found["output_tokens"]) == (6, 30 + 31 + 32 + 33 + 34 + 35)
    assert 0 < found["step_seconds"] <= found["span_seconds"] < found["wall_seconds"]
    assert 0 <= found["cost"] < 1
    assert found["steps"] >= 30 + 31
    assert 0.5 < found["fill"] <= 1


def test_a_row_that_ends_early_is_refused(tmp_path: Path) -> None:
    """The token that the model gives is named."""
    model = write_fake_folder(tmp_path / "model", eos_every=3)
    with pytest.raises(SystemExit, match=rf"\d+ tokens instead of 231: the model gives token {END_ID}"):
        main(["--model", str(model), "--workload", str(workload(tmp_path)), f"--eos-id={END_ID}", *FLAGS])
