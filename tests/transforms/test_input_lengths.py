"""Laws of an input's lengths: every row counts, and the first ones that can be answered give the mean."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from batchgen_beam.errors import InputError
from batchgen_beam.settings import InputColumns
from batchgen_beam.text.fake_folder import write_fake_folder
from batchgen_beam.transforms.input_lengths import InputLengths, input_lengths
from batchgen_beam.transforms.model_folder import ModelFolder
from tests.support.jobs import write_rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """Its tokens are bytes."""
    return ModelFolder.open(write_fake_folder(tmp_path_factory.mktemp("model") / "fake"), template=None,
                            clock=datetime(2026, 1, 1, tzinfo=UTC), max_context=None)


def lengths(folder: Path, model: ModelFolder, **more: int) -> InputLengths:
    """Of all files in a folder."""
    return input_lengths([f"{folder}/*"], InputColumns(), model, **more)


def test_all_rows_are_counted_and_the_first_are_measured(model: ModelFolder, tmp_path: Path) -> None:
    """Three files of both forms; the mean is that of the sample, in the order of the files."""
    write_rows(tmp_path / "a.parquet", [{"prompt": "x" * 10}] * 3, row_group_size=2)
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"prompt": "x" * 20}) + "\n" for _ in range(3)))
    write_rows(tmp_path / "c.parquet", [{"prompt": "x" * 60}] * 4, row_group_size=4)
    beside = lengths(tmp_path, model, sample=1).prompt_tokens - 10
    assert lengths(tmp_path, model) == InputLengths(rows=10, sampled=10,
                                                    prompt_tokens=beside + (30 + 60 + 240) / 10)
    assert lengths(tmp_path, model, sample=5) == InputLengths(rows=10, sampled=5, prompt_tokens=beside + 70 / 5)
    assert lengths(tmp_path, model, limit=4) == InputLengths(rows=4, sampled=4, prompt_tokens=beside + 50 / 4)


def test_rows_without_an_answer_have_no_length(model: ModelFolder, tmp_path: Path) -> None:
    """They count as rows; an input of them alone is refused with the remedy."""
    write_rows(tmp_path / "a.parquet", [{"prompt": ""}, {"prompt": "x" * 7}, {"prompt": None}], row_group_size=3)
    found = lengths(tmp_path, model)
    assert (found.rows, found.sampled) == (3, 1)
    with pytest.raises(InputError, match=r"none of its first 1 rows has a prompt .*--rows and --prompt-tokens"):
        lengths(tmp_path, model, sample=1)
