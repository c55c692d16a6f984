"""The order alternates, disturbed runs are done again, broken engines are not, and lengths are exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.race.engines import engine, engines
from benchmarks.race.process import Outcome, wrong_lengths
from benchmarks.race.schedule import agreement, order, race
from benchmarks.race.workloads import Row


def test_order_alternates() -> None:
    """Every second repeat runs backwards, and later ones begin with another engine."""
    assert [order("ABC", repeat) for repeat in range(4)] == [list("ABC"), list("CBA"), list("BCA"), list("ACB")]
    assert order(["alone"], 5) == ["alone"]


def script(*shares: float | str) -> Callable[[str, int, int], Outcome]:
    """Runs that come out as listed: a share of others' CPU, or why there is no result."""
    coming = list(shares)

    def run(name: str, repeat: int, attempt: int) -> Outcome:
        one = coming.pop(0)
        if isinstance(one, str):
            return Outcome(outcome=one, figures={"peak_rss_mib": 1})
        return Outcome(outcome="ok", figures={"others_share": one}, ids=[[1, 2], [3, 4]])

    return run


def outcomes(names: str, repeats: int, run: Callable[[str, int, int], Outcome]) -> list[tuple[Any, ...]]:
    """Engine, repeat, attempt and outcome of each record."""
    records = race(list(names), repeats=repeats, retries=2, most_others=0.05, run=run)
    return [(record["engine"], record["repeat"], record["attempt"], record["outcome"]) for record in records]


def test_disturbed_runs_are_repeated() -> None:
    """Until one is clean, or the retries are spent."""
    assert outcomes("A", 1, script(0.2, 0.06, 0.05)) == [
        ("A", 0, 0, "disturbed"), ("A", 0, 1, "disturbed"), ("A", 0, 2, "ok")]
    assert [record[3] for record in outcomes("A", 1, script(0.2, 0.3, 0.4, 0.0))] == ["disturbed"] * 3


def test_an_engine_without_a_result_is_not_run_again() -> None:
    """Neither in this repeat nor in later ones; the others go on."""
    assert outcomes("AB", 2, script("over 900 s", 0.0, 0.0)) == [
        ("A", 0, 0, "over 900 s"), ("B", 0, 0, "ok"), ("B", 1, 0, "ok")]


def test_some_engines_run_once() -> None:
    """The others have all their repeats."""
    records = race(["A", "B"], repeats=3, retries=0, most_others=1.0, run=script(*[0.0] * 4), once={"B"})
    assert [record["engine"] for record in records] == ["A", "B", "A", "A"]


def test_agreement_counts_from_the_front() -> None:
    """Rows with equal ids, and ids before the first difference."""
    assert agreement([[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 6]]) == {"equal_rows": 0.5, "mean_common_prefix": 2.0}
    records = list(race(["ours", "B"], repeats=1, retries=0, most_others=1.0, run=script(0.0, 0.0)))
    assert [record["agreement"]["equal_rows"] for record in records] == [1.0, 1.0]


def test_lengths_are_exact() -> None:
    """A row too few, a token too few and one too many are found."""
    rows = [Row(uuid="a", prompt_ids=(1,), max_tokens=2), Row(uuid="b", prompt_ids=(1,), max_tokens=1)]
    assert wrong_lengths(rows, [[5, 5], [5]]) is None
    assert wrong_lengths(rows, [[5, 5]]) == "1 answers for 2 rows"
    assert "first a: 1, not 2" in str(wrong_lengths(rows, [[5], [5]]))
    assert "first b: 2, not 1" in str(wrong_lengths(rows, [[5, 5], [5, 5]]))


def test_engines_take_settings_by_name() -> None:
    """Values are JSON where they can be; unknown names and double ones are refused."""
    changed = engine("llama_cpp:slots=32:weights=f16")
    assert changed.name == "llama_cpp:slots=32:weights=f16"
    assert (changed.settings["slots"], changed.settings["weights"], changed.settings["ubatch"]) == (32, "f16", 512)
    for wrong in ("nobody", "ours:slots=3", "ours,ours"):
        with pytest.raises(ValueError, match=r"unknown|no setting|twice"):
            engines(wrong)
