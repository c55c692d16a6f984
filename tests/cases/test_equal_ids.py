"""Case B4: rows that share an id, in a job that is stopped and run again."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen_beam.pipelines.main import OK, main
from batchgen_beam.text.fake_folder import write_fake_folder
from tests.support.jobs import engine_figures, published, report, run_flags, write_rows

pytestmark = pytest.mark.timeout(120)


def test_case_b4_rows_of_one_id_are_each_answered_and_kept(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Case B4: two live rows with one id have keys of their own, in the journal too; the summary tells of the id.

    Rows that are equal throughout are computed once and answered each.
    """
    model = write_fake_folder(tmp_path / "model")
    same = {"uuid": "twin", "prompt": "one"}
    rows = [same, {"uuid": "twin", "prompt": "two"}, same, {"uuid": "twin", "prompt": "one", "seed": 7}]
    write_rows(tmp_path / "a.parquet", rows)
    output = tmp_path / "out"
    flags = run_flags(tmp_path / "a.parquet", output, model, "--temperature=1")
    assert main(flags) == OK
    first = published(output)
    assert engine_figures(output)["rows_done"] == 3
    answers = [tuple(row["token_ids"]) for row in first]
    assert answers[0] == answers[2]
    assert len(set(answers)) == 3
    assert [row["occurrence"] for row in first] == [0, 1, 2, 3]
    next((output / "results").rglob("rg-*")).unlink()
    capsys.readouterr()
    assert main(flags) == OK
    assert published(output) == first
    counts = report(output)["counts"]
    assert (counts["reused"], counts["repeated_ids"], counts["repeated_id_rows"]) == (4, 1, 4)
    assert "1 ids occur more than once (4 rows)" in capsys.readouterr().out
