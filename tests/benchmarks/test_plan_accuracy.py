"""`python -m benchmarks.plan_accuracy`: a prediction and a measurement for each case, and how far they are apart."""

from __future__ import annotations

import re

import pytest

from benchmarks.plan_accuracy import main, table


def test_the_deviation_is_that_of_the_prediction() -> None:
    """A prediction of 3 s for 2 s is 50 % too much; no sub-batches means all rows."""
    lines = list(table([((8, 0), 3.0), ((8, 2), 1.5)], [2.0, 2.0]))
    assert lines[2:] == ["| 8 | 8 | 3.0000 | 2.0000 | +50 % |", "| 8 | 2 | 1.5000 | 2.0000 | -25 % |"]


def test_a_small_model_is_predicted_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each number of rows, whole and in sub-batches that are smaller."""
    main(["--layers=1", "--hidden=64", "--inner=32", "--experts=4", "--rows", "2", "4", "--attention-batch", "0", "2",
          "--context=64", "--repeats=1", "--threads=1"])
    said = capsys.readouterr().out
    assert re.search(r"^[\d,]+ bytes of weights, \w+ kernels, 1 threads; rows end at 64 tokens; medians of 1$", said,
                     re.M)
    cases = re.findall(r"^\| (\d+) \| (\d+) \| [\d.]+ \| [\d.]+ \| [+-]\d+ % \|$", said, re.M)
    assert cases == [("2", "2"), ("4", "4"), ("4", "2")]
