"""Laws of the demo: the committed rows, a real model, and a clear word where the model is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen_beam.pipelines.demo import demo_options
from batchgen_beam.pipelines.main import OK, USER_ERROR, main
from tests.support.jobs import ROOT, published, report

BAD_ROWS = {"EMPTY_PROMPT": 1, "INVALID_PARAMETER": 1, "INVALID_ROW": 2, "INVALID_TEXT": 1, "PROMPT_TOO_LONG": 1}


def test_a_missing_model_is_said_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is started; the message names the file and how to get it."""
    assert main(["demo", "--model=/nowhere/model.gguf"]) == USER_ERROR
    assert "/nowhere/model.gguf is not there; `make demo` fetches it" in capsys.readouterr().err


def test_results_of_the_demos_own_rows_show_what_they_are(tmp_path: Path) -> None:
    """The examples' business columns are kept; other rows may not have them."""
    model = tmp_path / "model"
    model.mkdir()
    assert demo_options([f"--model={model}"]).keep_columns == ("task", "ticket_id")
    assert demo_options([f"--model={model}", "--input=mine.parquet"]).keep_columns == ()
    assert demo_options([f"--model={model}", "--keep-columns=seed"]).keep_columns == ("seed",)


@pytest.mark.timeout(900)
@pytest.mark.long
@pytest.mark.smollm2
def test_the_demo_answers_54_rows_and_refuses_6(
        smollm2_gguf: Path, smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bad row has its code, the doubled id has two answers, and failed rows do not fail the demo."""
    monkeypatch.chdir(ROOT)
    output = tmp_path / "out"
    cache = smollm2_folder.parent
    assert main(["demo", f"--model={smollm2_gguf}", f"--output={output}", f"--model-cache={cache}"]) == OK
    counts = report(output)["counts"]
    assert (counts["rows"], counts["results"], counts["failed"]) == (60, 54, 6)
    assert counts["failures"] == BAD_ROWS
    assert (counts["repeated_ids"], counts["repeated_id_rows"]) == (1, 2)
    assert len(published(output)) == 54
    assert all(row["text"] is not None and row["ticket_id"] for row in published(output))
