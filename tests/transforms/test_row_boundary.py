"""Laws of the row boundary: a surprise stays with its row, what concerns the job does not become a row's failure."""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.testing.util import assert_that

from batchgen_beam.errors import EngineError, ErrorCode, RowError
from batchgen_beam.records import Answer, Failure, RowKey
from batchgen_beam.text.fake_folder import write_fake_folder
from batchgen_beam.text.tokenizer import Tokenizer
from batchgen_beam.transforms.generate import Generate, Round
from batchgen_beam.transforms.lanes import ToLanes
from batchgen_beam.transforms.prepare import Prepare
from batchgen_beam.transforms.row_boundary import at_row_boundary
from tests.support.hosting import host_handle, input_row

pytestmark = pytest.mark.timeout(60)

KEY = RowKey("a row", "0" * 64)


class Panic(BaseException):
    """What native extensions raise: no `Exception`."""


def outcome_of(error: BaseException) -> Any:
    """What the boundary makes of an error."""
    def work() -> str:
        raise error

    return at_row_boundary(KEY, work, lambda: "its head")


def test_what_succeeds_is_given_back() -> None:
    """The head is not asked for."""
    assert at_row_boundary(KEY, lambda: "a result", lambda: pytest.fail("no failure needs a head")) == "a result"


def test_a_row_error_keeps_its_code() -> None:
    """Message and code are the row's own."""
    failure = outcome_of(RowError(ErrorCode.INVALID_ROW, "no turns"))
    assert failure == Failure(key=KEY, code=ErrorCode.INVALID_ROW, message="no turns", prompt_head="its head")


@pytest.mark.parametrize("error", [ValueError("odd"), KeyError("odd"), RecursionError("odd"), Panic("odd")])
def test_a_surprise_fails_its_row_and_is_logged(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """The failure names the kind and the words, the log has the traceback and the row."""
    failure = outcome_of(error)
    assert (failure.code, failure.prompt_head) == (ErrorCode.ENGINE_ERROR, "its head")
    assert type(error).__name__ in failure.message
    assert "odd" in failure.message
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "a row" in record.getMessage()
    assert record.exc_info is not None


@pytest.mark.parametrize("error", [MemoryError(), EngineError("dead"), KeyboardInterrupt(), SystemExit(1)])
def test_what_concerns_the_job_is_raised(error: BaseException) -> None:
    """A process that is out of memory or being stopped is no row's fault."""
    with pytest.raises(type(error)):
        outcome_of(error)


def test_a_tokenizer_that_breaks_on_a_row_fails_that_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 57: surprises of the tokenizer, before and after the engine, fail their row; all others are answered."""
    encode, decode = Tokenizer.encode, Tokenizer.decode
    broken_once = threading.Event()

    def broken_encode(self: Tokenizer, text: str, add_bos: bool) -> array[int]:
        if "question 7" in text:
            raise ValueError("merge table overrun")
        return encode(self, text, add_bos)

    def broken_decode(self: Tokenizer, ids: Iterable[int]) -> str:
        if not broken_once.is_set():
            broken_once.set()
            raise Panic("index out of bounds")
        return decode(self, ids)

    monkeypatch.setattr(Tokenizer, "encode", broken_encode)
    monkeypatch.setattr(Tokenizer, "decode", broken_decode)
    handle = host_handle(write_fake_folder(tmp_path / "fake"))

    def check(answers: list[tuple[str, Answer]]) -> None:
        assert len({key for key, _ in answers}) == len(answers) == 20
        found = (answer for _, answer in answers if isinstance(answer, Failure))
        failures = sorted(found, key=lambda failure: failure.message)
        assert [failure.code for failure in failures] == [ErrorCode.ENGINE_ERROR] * 2
        assert "index out of bounds" in failures[0].message
        assert failures[0].prompt_head.startswith("question ")
        assert failures[1].key.uuid == "row-7"
        assert failures[1].prompt_head == "question 7."

    rows = [input_row(index, prompt=f"question {index}.", max_tokens=3 + index) for index in range(20)]
    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        prepared = pipeline | beam.Create(rows) | Prepare(handle)
        generated = prepared.prompts | ToLanes(2) | Generate(handle, Round(hashed=2))
        assert_that((prepared.failures, generated.answers) | beam.Flatten(), check)
    answered, failed = handle.acquire().tally.read()
    assert (answered, failed) == (18, {"ENGINE_ERROR": 2})
