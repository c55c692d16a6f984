"""Laws of the comparison with an offloading peer: its summary is the arithmetic that is written out here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from batchgen_beam.engine.planner import evaluate
from batchgen_beam.engine.tiers import Choice
from benchmarks.offload import batch_flags, summary
from tests.engine.test_planner import MODEL, WORK, Synthetic
from tests.engine.test_run_plan import NEEDS, placed


def run(engine: str, rows: int, speed: float | None, **more: Any) -> dict[str, Any]:
    """A line of a report."""
    return {"engine": engine, "limit_gb": 8, "rows": rows, "tokens_per_second": speed, **more}


REPORT = {"disk_rates": [1e9, 3e9], "own_batches": {"8": ["--rows", "1000"], "20": ["--rows", "50"]}, "runs": [
    run("ours", 1000, 300.0, decode_step=0.5, streamed_bytes=800_000_000),
    run("accelerate", 1, 2.0), run("ours", 1, 6.0, decode_step=0.1, streamed_bytes=1),
    run("accelerate", 32, 50.0), run("accelerate float32", 32, 45.0),
    run("ours", 32, 100.0, decode_step=0.2, streamed_bytes=1),
    run("accelerate", 64, None), run("ours", 64, 150.0, decode_step=0.3, streamed_bytes=1),
    run("ours", 1000, 500.0, decode_step=0.7, streamed_bytes=800_000_000)]}


def test_the_summary_by_hand() -> None:
    """Ours at its own batch, the median of two, over the peer's best that finished, in either arithmetic: 400 / 50,
    which is twice at the same batch times four by the batch; a step of 0.6 s whose 0.8 GB take 0.4 s at the disk's
    mean rate."""
    disk, _, _, line, unfinished = summary(REPORT)
    assert disk == "disk: 1.00, 3.00 GB/s by direct reads"
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "8 GB", "1,000", "400.0", "32", "50.0", "8.00", "2.00", "4.00", "0.600", "800,000,000", "0.400", "0.67"]
    assert unfinished.count("|") == line.count("|")
    assert unfinished.startswith("| 20 GB | 50 | - |")


def test_a_plan_is_given_to_our_process_whole() -> None:
    """Rows, tokens of a pass, and the rows of a sub-batch, 0 where they are all."""
    plan = evaluate(MODEL, Synthetic(), WORK, Choice(b_attn=4, b_moe=64), placed(NEEDS.total_bytes, Choice(
        b_attn=4, b_moe=64)))
    assert batch_flags(plan) == ["--rows", "64", "--step-tokens", "64", "--attention-batch", "4"]
    whole = replace(plan, choice=Choice(b_attn=100, b_moe=4096), rows=100)
    assert batch_flags(whole) == ["--rows", "100", "--step-tokens", "4096", "--attention-batch", "0"]
