"""Cases 52, 55, B13, B14: what a run leaves behind when it stops, and who may use it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from batchgen_beam.models.fake import FakeModel
from batchgen_beam.pipelines.main import FATAL, OK, main
from batchgen_beam.text.fake_folder import write_fake_folder
from tests.support.jobs import engine_figures, published, questions, report, run_flags, timeless, write_rows

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake model."""
    return write_fake_folder(tmp_path_factory.mktemp("model") / "fake")


class Breaking:
    """A model's head that raises once it has been called so often."""

    def __init__(self, calls: int) -> None:
        self.left = calls
        self.real = FakeModel.head

    def head(self, model: FakeModel, *arguments: Any, **named: Any) -> Any:
        """The real head, as long as it lasts."""
        self.left -= 1
        if self.left < 0:
            raise ArithmeticError("the head broke")
        return self.real(model, *arguments, **named)


def test_the_same_command_goes_on_where_a_job_stopped(
        model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases 52, B13, B14: a job that stops in its middle leaves answers and rows under way for the next.

    The second run samples what is missing, no more; all bits are those of a run that nothing disturbed.
    """
    write_rows(tmp_path / "a.parquet", questions(30))
    whole, output = tmp_path / "whole", tmp_path / "out"
    more = ("--temperature=1", "--seed=5", "--max-tokens=30")
    assert main(run_flags(tmp_path / "a.parquet", whole, model, *more)) == OK
    breaking = Breaking(60)
    with monkeypatch.context() as patch:
        patch.setattr(FakeModel, "head", lambda model, *values, **named: breaking.head(model, *values, **named))
        assert main(run_flags(tmp_path / "a.parquet", output, model, *more, "--checkpoint-interval=0")) == FATAL
    assert not (output / "results").exists()
    assert main(run_flags(tmp_path / "a.parquet", output, model, *more)) == OK
    assert timeless(published(output)) == timeless(published(whole))
    counts, figures = report(output)["counts"], engine_figures(output)
    assert counts["reused"] > 0
    assert counts["resumed"] > 0
    assert figures["rows_done"] == 30 - counts["reused"]
    assert figures["generated_tokens"] < counts["completion_tokens"]


def test_answers_under_different_content_never_meet(model: Path, tmp_path: Path) -> None:
    """Case 55: an output is made anew under other settings, and back: each has its own journal, nothing is mixed."""
    write_rows(tmp_path / "a.parquet", questions(12))
    output = tmp_path / "out"
    flags = run_flags(tmp_path / "a.parquet", output, model, "--new-fingerprint")
    assert main(flags) == OK
    first = published(output)
    assert main([*flags, "--max-tokens=5"]) == OK
    assert (report(output)["counts"]["reused"], engine_figures(output)["rows_done"]) == (0, 12)
    assert all(row["completion_tokens"] <= 5 for row in published(output))
    assert main(flags) == OK
    assert (report(output)["counts"]["reused"], engine_figures(output)["engines"]) == (12, 0)
    assert published(output) == first
