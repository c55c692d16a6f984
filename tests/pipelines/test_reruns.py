"""Laws of running the same command again: what is found is not computed, what is unchanged is not touched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from batchgen_beam.errors import ErrorCode
from batchgen_beam.pipelines import launch
from batchgen_beam.pipelines.main import OK, ROWS_FAILED, USER_ERROR, main
from batchgen_beam.records import (
    ContinuationRecord,
    Failure,
    Outcome,
    RowKey,
    TokenLogprobs,
    token_array,
)
from batchgen_beam.storage.journal import Journal
from batchgen_beam.storage.settling import Entry
from batchgen_beam.text.fake_folder import write_fake_folder
from tests.faults.job import write_tiny_model
from tests.support.hosting import host_handle
from tests.support.jobs import engine_figures, published, questions, report, run_flags, timeless, write_rows
from tests.support.storing import read_all, write_lines

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake model."""
    return write_fake_folder(tmp_path_factory.mktemp("model") / "fake")


def journal_of(output: Path) -> Journal:
    """The journal of an output folder."""
    return Journal.of(str(output), report(output)["content_print"]["digest"])


def entries_of(output: Path) -> list[Entry]:
    """Everything in an output folder's journal."""
    journal = journal_of(output)
    return [entry for part in journal.parts() for entry in journal.entries(part).entries]


def replace_journal(output: Path, entries: Iterable[Entry]) -> None:
    """Put these entries in the place of all parts."""
    journal = journal_of(output)
    for part in journal.parts():
        journal.delete(part)
    journal.write("earlier", entries)


def unit_times(output: Path) -> dict[str, int]:
    """When each file of results and failures, and each record, was written."""
    return {str(path.relative_to(output)): path.stat().st_mtime_ns
            for kind in ("results", "failures", "_units") for path in (output / kind).rglob("rg-*")}


def computed(output: Path) -> tuple[int, int]:
    """Rows that engines of the latest run finished, and tokens that they sampled."""
    figures = engine_figures(output)
    return figures["rows_done"], figures["generated_tokens"]


def test_an_edit_and_a_new_file_cost_exactly_the_new_rows(model: Path, tmp_path: Path) -> None:
    """Case 53: one prompt of 1,000 is edited and a file is added; nothing else is computed or written.

    The unit of the edited row is published again with 249 answers from the journal.
    """
    rows = questions(1000)
    source, output = tmp_path / "in", tmp_path / "out"
    write_rows(source / "a.parquet", rows, row_group_size=250)
    flags = run_flags(source / "*.parquet", output, model, "--max-tokens=4")
    assert main(flags) == OK
    first, before = published(output), unit_times(output)
    rows[300]["prompt"] = "an edited question"
    write_rows(source / "a.parquet", rows, row_group_size=250)
    write_rows(source / "b.parquet", questions(7, start=2000))
    assert main(flags) == OK
    counts, second = report(output)["counts"], published(output)
    assert (counts["skipped_units"], counts["skipped_rows"], counts["reused"]) == (3, 750, 249)
    new = [second[300], *second[1000:]]
    assert computed(output) == (8, sum(row["completion_tokens"] for row in new))
    assert [row["uuid"] for row in second] == [row["uuid"] for row in [*rows, *questions(7, start=2000)]]
    assert timeless(second[:300] + second[301:1000]) == timeless(first[:300] + first[301:])
    changed = {name for name, time in unit_times(output).items() if before.get(name) != time}
    assert {name.partition("rg-")[0].rpartition("/in/")[2] + name.partition("rg-")[2][:6] for name in changed} == {
        "a.parquet/000001", "b.parquet/000000"}


def test_a_finished_run_computes_nothing_again(
        model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command writes reports only; no model is loaded."""
    write_rows(tmp_path / "a.parquet", [*questions(20), {"uuid": "bad", "prompt": ""}])
    output = tmp_path / "out"
    flags = run_flags(tmp_path / "a.parquet", output, model)
    assert main(flags) == ROWS_FAILED
    first, before = report(output)["counts"], unit_times(output)
    capsys.readouterr()
    assert main(flags) == ROWS_FAILED
    assert unit_times(output) == before
    assert report(output)["counts"] == {**first, "skipped_units": 1, "skipped_rows": 21}
    assert engine_figures(output)["engines"] == 0
    said = capsys.readouterr()
    assert "loading the model" not in said.err
    assert "21/21 rows" in said.err
    assert "of these 21 by earlier runs: 21 in 1 units that stay as they are, 0 from the journal" in said.out


def test_another_kv_dtype_is_refused_by_name(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers of other bits do not mix in one folder, whichever of the two settings came first."""
    write_rows(tmp_path / "a.parquet", questions(3))
    tiny = write_tiny_model(tmp_path / "tiny")
    for kv_dtype, other in (("auto", "int8"), ("int8", "auto")):
        flags = run_flags(tmp_path / "a.parquet", tmp_path / kv_dtype, tiny, "--max-tokens=2")
        assert main([*flags, f"--kv-dtype={kv_dtype}"]) == OK
        capsys.readouterr()
        assert main([*flags, f"--kv-dtype={other}"]) == USER_ERROR
        assert f"kv_dtype: {kv_dtype} -> {other}" in capsys.readouterr().err


def test_a_model_without_keys_and_values_takes_no_kv_dtype(model: Path, tmp_path: Path,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before anything runs or is written."""
    write_rows(tmp_path / "a.parquet", questions(3))
    flags = run_flags(tmp_path / "a.parquet", tmp_path / "out", model)
    assert main([*flags, "--kv-dtype=int8"]) == USER_ERROR
    assert "--kv-dtype=int8: the model keeps no keys and values; use --kv-dtype=auto" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*flags, "--kv-dtype=auto"]) == OK


def test_lost_files_come_back_from_the_journal(model: Path, tmp_path: Path) -> None:
    """All results are deleted: they are published again, bit for bit, and no engine is loaded."""
    write_rows(tmp_path / "a.parquet", questions(30), row_group_size=10)
    output = tmp_path / "out"
    flags = run_flags(tmp_path / "a.parquet", output, model, "--logprobs=2", "--temperature=1")
    assert main(flags) == OK
    first = published(output)
    for path in (output / "results").rglob("rg-*"):
        path.unlink()
    assert main(flags) == OK
    assert published(output) == first, "times of queueing and generating too"
    assert report(output)["counts"]["reused"] == 30
    assert engine_figures(output)["engines"] == 0


def test_a_part_of_the_journal_that_is_torn_costs_its_rows_only(
        model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is counted, named in the log and left where it is; its rows are computed again, with the same bits."""
    write_rows(tmp_path / "a.parquet", questions(20))
    output = tmp_path / "out"
    flags = run_flags(tmp_path / "a.parquet", output, model)
    assert main(flags) == OK
    first, entries = published(output), entries_of(output)
    replace_journal(output, entries[:12])
    torn = Path(journal_of(output).write("earlier", entries[12:]).path.removeprefix("file://"))
    torn.write_bytes(torn.read_bytes()[:-40])
    next((output / "results").rglob("rg-*")).unlink()
    capsys.readouterr()
    assert main(flags) == OK
    counts = report(output)["counts"]
    assert (counts["reused"], counts["journal_problems"]) == (12, 1)
    assert computed(output)[0] == 8
    assert timeless(published(output)) == timeless(first)
    assert "1 parts of the journal could not be read" in capsys.readouterr().out
    assert torn.exists()


def test_rows_go_on_where_they_were_left(model: Path, tmp_path: Path) -> None:
    """A continuation in the journal saves its tokens and changes no bit; entries of edited rows are ignored."""
    write_rows(tmp_path / "a.parquet", questions(6))
    output = tmp_path / "out"
    flags = run_flags(tmp_path / "a.parquet", output, model, "--temperature=1", "--seed=7", "--max-tokens=40")
    assert main(flags) == OK
    first = published(output)
    answers = {entry.key.uuid: entry for entry in entries_of(output) if isinstance(entry, Outcome)}
    prompts = prompt_ids(tmp_path / "a.parquet", model)
    records = [cut(answers[uuid], prompts[uuid], len(answers[uuid].token_ids) // 2) for uuid in ("id-1", "id-4")]
    stranger = Failure(key=RowKey("id-2", "of an older prompt"), code=ErrorCode.TEMPLATE_ERROR, message="m")
    replace_journal(output, [*records, answers["id-2"], stranger])
    next((output / "results").rglob("rg-*")).unlink()
    assert main(flags) == OK
    assert timeless(published(output)) == timeless(first)
    counts = report(output)["counts"]
    assert (counts["reused"], counts["resumed"]) == (1, 2)
    saved = sum(len(record.generated_ids) for record in records) + answers["id-2"].completion_tokens
    assert computed(output) == (5, counts["completion_tokens"] - saved)


def prompt_ids(source: Path, model: Path) -> dict[str, Sequence[int]]:
    """The token ids of each row's prompt, by id."""
    preparer = host_handle(model).acquire().preparer()
    return {row.key.uuid: preparer.prepare(row).token_ids for row in read_all(source)[0]}


def cut(answer: Outcome, prompt: Sequence[int], length: int) -> ContinuationRecord:
    """The row as it was after `length` tokens."""
    logprobs = TokenLogprobs(chosen=answer.logprobs.chosen[:length])
    return ContinuationRecord(key=answer.key, prompt_ids=token_array(prompt), logprobs=logprobs,
                              generated_ids=answer.token_ids[:length], params=answer.params,
                              content_print=answer.content_print, numeric_print=answer.numeric_print)


FAILING = {"id-1": ErrorCode.NUMERIC_ERROR, "id-2": ErrorCode.GRAMMAR_ERROR, "id-3": ErrorCode.CANCELLED}


def fail_in_journal(output: Path) -> None:
    """Rows 1 to 3 have failed: in the journal, not in what was published."""
    entries = [entry for entry in entries_of(output) if isinstance(entry, Outcome)]
    replace_journal(output, [
        Failure(key=entry.key, code=FAILING[entry.key.uuid], message="m", prompt_head="h")
        if entry.key.uuid in FAILING else entry for entry in entries])
    for path in (output / "results").rglob("rg-*"):
        path.unlink()


def failed(output: Path) -> set[str]:
    """Ids in failures/."""
    return {row["uuid"] for row in published(output, "failures")}


def test_failures_stay_unless_they_may_pass_or_are_asked_for(model: Path, tmp_path: Path) -> None:
    """Case 53: transient ones are tried by every run, final ones only with `--retry-failed`, by code; success stays."""
    write_rows(tmp_path / "a.parquet", questions(5))
    output = tmp_path / "out"
    flags = run_flags(tmp_path / "a.parquet", output, model)
    assert main(flags) == OK
    fail_in_journal(output)
    assert main(flags) == ROWS_FAILED
    assert failed(output) == {"id-1", "id-2"}
    assert [row["message"] for row in published(output, "failures")] == ["m", "m"]
    assert computed(output)[0] == 1
    assert main([*flags, "--retry-failed=GRAMMAR_ERROR,EMPTY_PROMPT"]) == ROWS_FAILED
    assert failed(output) == {"id-1"}
    assert computed(output)[0] == 1
    assert main(flags) == ROWS_FAILED
    assert engine_figures(output)["engines"] == 0
    assert main([*flags, "--retry-failed"]) == OK
    assert computed(output)[0] == 1
    assert report(output)["counts"]["reused"] == 4
    assert main([*flags, "--retry-failed"]) == OK
    assert engine_figures(output)["engines"] == 0


def test_an_unknown_code_is_refused_by_name(
        model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One message with the code and those there are."""
    write_rows(tmp_path / "a.parquet", questions(3))
    assert main(run_flags(tmp_path / "a.parquet", tmp_path / "out", model, "--retry-failed=OOPS")) == USER_ERROR
    last = capsys.readouterr().err.splitlines()[-1]
    assert "--retry-failed: 'OOPS' is no code of a failure; use some of EMPTY_PROMPT, " in last


def test_a_large_input_is_done_in_passes(
        model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Row groups and files in passes give what a single one gives, with one engine; a second run finds all of it."""
    rows = questions(60)
    write_rows(tmp_path / "in" / "a.parquet", rows[:40], row_group_size=15)
    write_lines(tmp_path / "in" / "b.jsonl", rows[40:])
    whole, passes = tmp_path / "whole", tmp_path / "passes"
    assert main(run_flags(tmp_path / "in" / "*", whole, model, "--logprobs=1")) == OK
    monkeypatch.setattr(launch, "PASS_ROWS", 20)
    flags = run_flags(tmp_path / "in" / "*", passes, model, "--logprobs=1")
    capsys.readouterr()
    assert main(flags) == OK
    assert "the input is done in 3 passes of about 20 rows" in capsys.readouterr().err
    assert timeless(published(passes)) == timeless(published(whole))
    assert report(passes)["counts"] == report(whole)["counts"]
    assert (engine_figures(passes)["engines"], engine_figures(passes)["rows_done"]) == (1, 60)
    before = unit_times(passes)
    for path in (passes / "results").rglob("rg-000001*"):
        path.unlink()
    assert main(flags) == OK
    counts = report(passes)["counts"]
    assert (counts["skipped_units"], counts["skipped_rows"], counts["reused"]) == (3, 45, 15)
    changed = {name for name, time in unit_times(passes).items() if before[name] != time}
    assert all("rg-000001" in name for name in changed)
