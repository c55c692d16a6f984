"""Laws of the Prepare step: every row leaves as a prompt or as a failure, never as both or neither."""

from __future__ import annotations

from pathlib import Path

import apache_beam as beam
from apache_beam.testing.util import assert_that

from batchgen_beam.errors import ErrorCode
from batchgen_beam.records import Failure, Prompt
from batchgen_beam.text.fake_folder import write_fake_folder
from batchgen_beam.transforms.prepare import Prepare
from tests.support.hosting import host_handle, input_row

BAD = {
    1: ({"prompt": ""}, ErrorCode.EMPTY_PROMPT),
    2: ({"prompt": "x" * 5000}, ErrorCode.PROMPT_TOO_LONG),
    3: ({"messages": [{"role": "system", "content": "be brief"}]}, ErrorCode.TEMPLATE_ERROR),
    4: ({"prompt": "a lone \ud800 surrogate"}, ErrorCode.INVALID_TEXT),
    5: ({"prompt": "p", "temperature": -1.0}, ErrorCode.INVALID_PARAMETER),
    6: ({"prompt": "p", "stop": "x"}, ErrorCode.UNSUPPORTED_PARAMETER),
    7: ({}, ErrorCode.INVALID_ROW),
}


def test_bad_rows_become_failures_and_touch_no_other(tmp_path: Path) -> None:
    """Each bad row gives its own code and the beginning of its prompt; all others become prompts."""
    handle = host_handle(write_fake_folder(tmp_path / "fake"))
    rows = [input_row(index, **BAD[index][0]) if index in BAD else input_row(index, prompt=f"question {index}")
            for index in range(12)]

    def check_failures(failures: list[tuple[str, Failure]]) -> None:
        assert {key: failure.code for key, failure in failures} == {rows[i].key.text: BAD[i][1] for i in BAD}
        assert all(key == failure.key.text for key, failure in failures)
        heads = {failure.code: failure.prompt_head for _, failure in failures}
        assert heads[ErrorCode.PROMPT_TOO_LONG].startswith("xxx")
        assert heads[ErrorCode.INVALID_TEXT].encode()

    def check_prompts(prompts: list[Prompt]) -> None:
        assert sorted(prompt.key for prompt in prompts) == sorted(row.key for i, row in enumerate(rows) if i not in BAD)

    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        prepared = pipeline | beam.Create(rows) | Prepare(handle)
        assert_that(prepared.failures, check_failures, label="failures")
        assert_that(prepared.prompts, check_prompts, label="prompts")
    answered, failed = handle.acquire().tally.read()
    assert (answered, sum(failed.values())) == (0, len(BAD))
