"""Tables from records as real runs write them: what counts, what is marked, and figures against each other."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.race.__main__ import report
from benchmarks.race.report import find_races, markdown, summary

OURS = {"kernels": "native", "device": "cpu", "path": "avx512_bf16", "version": 1, "dtype": "bfloat16",
        "torch": "2.15.0+cu132", "capability": "AVX512", "max_rows": 256, "step_tokens": 512, "steps": 143,
        "evictions": 0, "recomputed_tokens": 0}
OPENVINO = {"openvino_genai": "2026.4.1.0-3408-ab01d1771e4", "openvino": "2026.4.1-22982-e213a147257-releases/2026/4",
            "INFERENCE_NUM_THREADS": 2, "INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}


def record(engine: str, repeat: int, seconds: float, **changes: object) -> dict[str, Any]:
    """One process, undisturbed."""
    return {"engine": engine, "repeat": repeat, "attempt": 0, "outcome": "ok", "seconds": seconds,
            "load_seconds": 5.5, "warmup_seconds": 0.5, "own_cpu_seconds": 5.59, "others_cpu_seconds": 0.1,
            "others_share": 0.01, "peak_rss_mib": 2048, "facts": OURS if engine == "ours" else OPENVINO,
            "agreement": {"equal_rows": 0.5, "mean_common_prefix": 39.5}, **changes}


@pytest.fixture
def race() -> dict[str, Any]:
    """One workload; OpenVINO was disturbed once, vLLM each time, llama.cpp took too long."""
    runs = [record("ours", 0, 10.0), record("openvino", 0, 90.0, outcome="disturbed", others_share=0.4),
            record("openvino", 0, 20.0, attempt=1), record("openvino", 1, 24.0), record("openvino", 2, 22.0),
            record("ours", 1, 12.0), record("ours", 2, 11.0, others_share=0.03),
            record("vllm", 0, 50.0, outcome="disturbed", others_share=0.3),
            record("vllm", 0, 40.0, outcome="disturbed", others_share=0.2, attempt=1),
            {"engine": "llama_cpp", "repeat": 0, "attempt": 0, "outcome": "over 900 s", "peak_rss_mib": 703}]
    return {
        "format": 1, "runs": runs, "model": "gguf-b179c9523d0e6a0f98a330c7562b6827-v1",
        "workload": {"name": "W1s", "rows": 64, "prompt_tokens": 4582, "output_tokens": 4799, "longest_row": 536,
                     "shared_prefix": 0, "sha256": "ea785cd4"},
        "machine": {"cpu": "AMD EPYC", "family": "26/2", "instructions": ["avx2", "avx512_bf16"], "cores": 2,
                    "memory_gib": 24, "kernel": "6.18.44", "python": "3.11.7", "date": "2026-12-02",
                    "path": "avx512_bf16"},
        "settings": {"repeats": 3, "retries": 1, "limit_seconds": 900, "most_others": 0.05, "active_rows": 256,
                     "threads": 2, "kv_gib": 2},
        "roofline": {"best": {"flops": 6.0e11, "read": 3.7e10, "read_by": {}, "products": []}, "gemm": [], "read": []},
        "bound": {"steps": 512, "compute_seconds": 1.0, "read_seconds": 3.0, "attention_seconds": 0.4,
                  "sum_seconds": 4.4, "overlap_seconds": 3.3}}


def test_figures_of_clean_runs(race: dict[str, Any]) -> None:
    """Medians, spread, load with warm-up, the share of the bound, and ours over it."""
    found = {figures["engine"]: figures for figures in summary(race)}
    openvino = found["openvino"]
    assert (openvino["median_seconds"], openvino["least_seconds"], openvino["most_seconds"]) == (22.0, 20.0, 24.0)
    assert (openvino["load_seconds"], openvino["with_load_seconds"]) == (6.0, 28.0)
    assert openvino["output_tokens_per_second"] == pytest.approx(4799 / 22)
    assert (openvino["of_bound"], openvino["of_overlap_bound"]) == pytest.approx((0.2, 0.15))
    assert (openvino["ours_over_it"], found["ours"]["ours_over_it"]) == (2.0, 1.0)
    assert (openvino["peak_rss_gib"], found["ours"]["others_share"]) == (2.0, 0.03)


def test_fastest_first_and_those_without_a_time_last(race: dict[str, Any]) -> None:
    """The engine that took too long has a row too."""
    assert [figures["engine"] for figures in summary(race)] == ["ours", "openvino", "vllm", "llama_cpp"]


def test_disturbed_runs_count_only_where_there_is_no_other(race: dict[str, Any]) -> None:
    """Then the least disturbed one of each repeat counts, and is marked."""
    vllm = next(figures for figures in summary(race) if figures["engine"] == "vllm")
    assert (vllm["disturbed"], vllm["runs"], vllm["median_seconds"]) == (True, 1, 40.0)
    assert "| vllm (disturbed) | 1 | 40.0 |" in markdown([race])


def test_tables_of_several_races_from_their_files(race: dict[str, Any], tmp_path: Path) -> None:
    """All races of all folders; versions once."""
    for name in ("W1s", "W2"):
        (tmp_path / name).mkdir()
        other = {**race, "workload": {**race["workload"], "name": name}}
        (tmp_path / name / f"race-{name}.json").write_text(json.dumps(other))
    text = markdown(find_races([tmp_path / "W1s", tmp_path / "W2"]))
    assert [line for line in text.splitlines() if line.startswith("### ")] == ["### W1s", "### W2"]
    assert "| ours | 3 | 11.0 | 10.0-12.0 | 436 | 6.0 | 17.0 | 2.0 | 3.0 | 0.40 | 1.00 |" in text
    assert "| llama_cpp | 0 |" in text
    assert "Other outcomes: openvino: disturbed; vllm: disturbed; llama_cpp: over 900 s." in text
    assert text.count("- openvino: openvino_genai 2026.4.1.0") == 1


def test_versions_come_from_the_first_race_that_knows_them(race: dict[str, Any]) -> None:
    """An engine that only failed in one race still has its version from another."""
    other = {**race, "runs": [record("ours", 0, 10.0), record("llama_cpp", 0, 30.0, facts={"llama_cpp": "b42"})]}
    for races in ([race, other], [other, race]):
        assert markdown(races).count("- llama_cpp: llama_cpp b42\n") == 1


def test_without_rates_there_is_no_share(race: dict[str, Any]) -> None:
    """A race without a roofline still has its table."""
    short = {key: value for key, value in race.items() if key not in ("roofline", "bound")}
    assert "| ours | 3 | 11.0 | 10.0-12.0 | 436 | 6.0 | 17.0 | 2.0 | 3.0 | - | 1.00 |" in markdown([short])


def test_a_report_leaves_nothing_that_the_next_one_reads(race: dict[str, Any], tmp_path: Path,
                                                         capsys: pytest.CaptureFixture[str]) -> None:
    """Without the environment that draws, the tables are printed, each time the same."""
    (tmp_path / "race-W1.json").write_text(json.dumps(race))
    texts = []
    for _ in range(2):
        report(Namespace(folders=[tmp_path], home=tmp_path / "nothing"))
        texts.append(capsys.readouterr())
    assert texts[0] == texts[1]
    assert "| ours | 3 |" in texts[0].out
    assert "no picture" in texts[0].err
    assert [file.name for file in tmp_path.iterdir()] == ["race-W1.json"]
