"""Laws of a whole run, in one process: order, counts, reuse of an output folder, and what each flag does."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import NoReturn

import pytest

from batchgen_beam.models.fake import FakeModel
from batchgen_beam.pipelines import launch
from batchgen_beam.pipelines.main import FATAL, OK, ROWS_FAILED, USER_ERROR, main
from batchgen_beam.text.fake_folder import write_fake_folder
from tests.support.jobs import engine_figures, published, questions, report, run_flags, timeless, write_rows

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake model."""
    return write_fake_folder(tmp_path_factory.mktemp("model") / "fake")


def test_results_stand_in_input_order(model: Path, tmp_path: Path) -> None:
    """Whatever the lanes and whoever ends first, rows are published in the order of each file and row group."""
    rows = questions(90)
    random.Random(3).shuffle(rows)
    for index, row in enumerate(rows):
        row["max_tokens"] = 1 + (index * 37) % 40
    write_rows(tmp_path / "in" / "a.parquet", rows[:50], row_group_size=20)
    write_rows(tmp_path / "in" / "b.parquet", rows[50:])
    outputs = []
    for lanes in (1, 3):
        output = tmp_path / f"out-{lanes}"
        assert main(run_flags(tmp_path / "in" / "*.parquet", output, model, f"--lanes={lanes}")) == OK
        outputs.append(timeless(published(output)))
    assert [row["uuid"] for row in outputs[0]] == [row["uuid"] for row in rows]
    assert outputs[0] == outputs[1]
    assert all(row["completion_tokens"] <= rows[index]["max_tokens"] for index, row in enumerate(outputs[0]))


def test_counts_balance_and_each_bad_row_has_its_code(model: Path, tmp_path: Path) -> None:
    """Bad rows, doubled ids and good rows side by side: every row is counted and published once."""
    rows = [*questions(20), {"uuid": "empty", "prompt": ""}, {"uuid": "both", "prompt": "x", "messages": '["no turn"]'},
            {"uuid": "hot", "prompt": "x", "temperature": -1.0}, {"uuid": "id-3", "prompt": "another question"},
            {"uuid": "id-4", "prompt": questions(20)[4]["prompt"]}]
    write_rows(tmp_path / "a.parquet", rows)
    output = tmp_path / "out"
    assert main(run_flags(tmp_path / "a.parquet", output, model, "--keep-columns=prompt")) == ROWS_FAILED
    counts = report(output)["counts"]
    assert (counts["rows"], counts["results"], counts["failed"]) == (25, 22, 3)
    failures = {row["uuid"]: row["code"] for row in published(output, "failures")}
    assert failures == {"empty": "EMPTY_PROMPT", "both": "INVALID_ROW", "hot": "INVALID_PARAMETER"}
    results = published(output)
    assert [row["uuid"] for row in results] == [row["uuid"] for row in rows if row["uuid"] not in failures]
    assert [row["prompt"] for row in results] == [row["prompt"] for row in rows if row["uuid"] not in failures]
    same = [row for row in results if row["uuid"] == "id-4"]
    assert [row["occurrence"] for row in same] == [0, 1]
    assert same[0]["token_ids"] == same[1]["token_ids"]
    assert counts["repeated_ids"] == 2


def test_an_output_is_reused_for_the_same_content_only(
        model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same command publishes the same files again; other content is refused by name, or replaces them if told."""
    write_rows(tmp_path / "a.parquet", questions(12))
    output = tmp_path / "out"
    flags = run_flags(tmp_path / "a.parquet", output, model)
    assert main(flags) == OK
    first = published(output)
    assert main([*flags, "--max-rows=3", "--prefill-chunk=7"]) == OK
    assert timeless(published(output)) == timeless(first)
    capsys.readouterr()
    assert main([*flags, "--max-tokens=5"]) == USER_ERROR
    assert "max_tokens: 16 -> 5" in capsys.readouterr().err
    assert (output / "_SUCCESS").exists()
    assert main([*flags, "--max-tokens=5", "--new-fingerprint"]) == OK
    assert all(row["completion_tokens"] <= 5 for row in published(output))


def test_failed_rows_may_be_allowed(model: Path, tmp_path: Path) -> None:
    """The report says the same; only the exit code differs."""
    write_rows(tmp_path / "a.parquet", [*questions(3), {"uuid": "bad", "prompt": ""}])
    assert main(run_flags(tmp_path / "a.parquet", tmp_path / "out", model, "--allow-failures")) == OK
    assert report(tmp_path / "out")["counts"]["failures"] == {"EMPTY_PROMPT": 1}


def test_a_job_that_stops_is_fatal(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An output that can't be written stops the job with one last line, and no _SUCCESS is left."""
    write_rows(tmp_path / "a.parquet", questions(3))
    results = tmp_path / "out" / "results"
    results.mkdir(parents=True)
    (results / tmp_path.parts[1]).write_text("a file where the folder of the input's units should be")
    assert main(run_flags(tmp_path / "a.parquet", tmp_path / "out", model)) == FATAL
    assert "batchgen-beam: the job stopped: " in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out" / "_SUCCESS").exists()


def test_two_processes_give_the_bits_of_one(model: Path, tmp_path: Path) -> None:
    """Workers in processes of their own load one engine each; results are those of a run in one process."""
    write_rows(tmp_path / "a.parquet", questions(40), row_group_size=10)
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(run_flags(tmp_path / "a.parquet", one, model)) == OK
    more = ("--direct_num_workers=2", "--direct_running_mode=multi_processing", "--lanes=4")
    assert main(run_flags(tmp_path / "a.parquet", two, model, *more)) == OK
    assert timeless(published(two)) == timeless(published(one))
    assert 1 <= engine_figures(two)["engines"] <= 2


def test_rounds_give_the_bits_of_one(tmp_path: Path) -> None:
    """Rows that leave their lanes twice and go on in others are published as if they had not; the report says so."""
    write_rows(tmp_path / "a.parquet", questions(40), row_group_size=10)
    one, three = tmp_path / "one", tmp_path / "three"
    endless = write_fake_folder(tmp_path / "endless", eos_every=0)
    more = ("--max-tokens=300", "--max-rows=100")
    assert main(run_flags(tmp_path / "a.parquet", one, endless, *more)) == OK
    assert main(run_flags(tmp_path / "a.parquet", three, endless, *more, "--rounds=3", "--lanes=4")) == OK
    assert timeless(published(three)) == timeless(published(one))
    assert (report(one)["rounds"], report(three)["rounds"]) == (1, 3)
    assert engine_figures(one)["moves"] == {}
    assert sum(engine_figures(three)["moves"].values()) == engine_figures(three)["resumed_rows"] > 0


def test_limit_reads_the_first_rows(model: Path, tmp_path: Path) -> None:
    """Files by name, rows in order."""
    write_rows(tmp_path / "in" / "a.parquet", questions(5))
    write_rows(tmp_path / "in" / "b.parquet", questions(5, start=5))
    assert main(run_flags(tmp_path / "in" / "*.parquet", tmp_path / "out", model, "--limit=7")) == OK
    assert [row["uuid"] for row in published(tmp_path / "out")] == [f"id-{index}" for index in range(7)]


def test_json_lines_are_read_too(model: Path, tmp_path: Path) -> None:
    """One bad line is one failure with its place; ids are made from places where there are none."""
    lines = '{"prompt": "one"}', "not json", '{"messages": [{"role": "user", "content": "two"}]}'
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    output = tmp_path / "out"
    assert main(run_flags(tmp_path / "a.jsonl", output, model)) == ROWS_FAILED
    assert [row["row"] for row in published(output)] == [0, 2]
    assert [(row["code"], row["row"]) for row in published(output, "failures")] == [("INVALID_ROW", 1)]


@pytest.mark.parametrize(("flags", "message"), [
    (["--kv-memory=99"], r"one KV page of each cache group need \d+ bytes, --kv-memory is 99"),
    (["--runner=NoSuchRunner"], r"--runner=NoSuchRunner is no runner; use one of "),
    (["--runner=DataflowRunner"], r"workers on other machines.*its URI .*--model=file:///.*--model=worker:/"),
    (["--eos-ids=99999"], r"--eos-ids: 99999 is outside"),
    (["--input=nowhere://a/b.parquet"], r"nowhere://a/b\.parquet"),
    (["--runner=BundleBasedDirectRunner"], r"BundleBasedDirectRunner is not supported"),
    (["--streaming"], r"--streaming is not supported"),
    (["--keep-columns=uuid"], r"'uuid' can't be kept"),
    (["--keep-columns=colour"], r"'colour'"),
    (["--temperature=9"], r"temperature must be a number in \[0, 2\], got 9"),
    (["--lanes=5000"], r"--lanes=5000"),
    (["--rounds=9"], r"--rounds=9: between 1 and 4 rounds"),
    (["--limit=0"], r"--limit must be at least 1"),
    (["--prompt-column=question"], r"'question'"),
    (["--chat-template=/nowhere.jinja"], r"/nowhere\.jinja"),
    (["--max-rows=0"], r"--max-rows must be at least 1, got 0"),
    (["--threads=100000"], r"--threads must be at most 1024, got 100000"),
    (["--progress-interval=inf"], r"--progress-interval must be over 0 and at most 86400 seconds, got inf"),
    ([f"--kv-memory={'9' * 400}"], r"--kv-memory: 9{40}\.\.\. is over \d+ bytes"),
    (["--runner=DataflowRunner", "--environment_type=LOOPBACK"], r"--runner=DataflowRunner: .*project.*region"),
])
def test_a_mistake_is_refused_before_beam_starts(
        flags: list[str], message: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One message names the thing; the output folder is not begun."""
    write_rows(tmp_path / "a.parquet", questions(3))
    assert main(run_flags(tmp_path / "a.parquet", tmp_path / "out", model, *flags)) == USER_ERROR
    assert re.search(message, capsys.readouterr().err.strip().splitlines()[-1])
    assert not (tmp_path / "out").exists()


def test_an_eos_id_outside_the_vocabulary_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It could never be sampled; the message names the folder and both numbers."""
    small = write_fake_folder(tmp_path / "small", vocab_size=200)
    write_rows(tmp_path / "a.parquet", questions(3))
    assert main(run_flags(tmp_path / "a.parquet", tmp_path / "out", small)) == USER_ERROR
    assert re.search(r"model .*small: its EOS id 256 is outside its vocabulary of 200", capsys.readouterr().err)


def test_messages_without_a_template_are_refused_at_start(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that has no chat template can't answer a column of messages, unless a template file is given."""
    bare = write_fake_folder(tmp_path / "bare", template=None)
    write_rows(tmp_path / "a.parquet", [{"uuid": "1", "messages": [{"role": "user", "content": "hello"}]}])
    assert main(run_flags(tmp_path / "a.parquet", tmp_path / "out", bare)) == USER_ERROR
    assert "has no chat template" in capsys.readouterr().err
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    assert main(run_flags(tmp_path / "a.parquet", tmp_path / "out", bare, f"--chat-template={template}")) == OK


@pytest.mark.parametrize(("output", "message"), [
    ("taken", r"output .*taken can't be a folder: .*taken is a file; choose another --output"),
    ("taken/below", r"output .*below can't be a folder: .*taken is a file"),
    ("nowhere://bucket/out", r"nowhere://bucket/out"),
    ("half", r"output .*half can't be used: .*half/results is a file"),
])
def test_an_output_that_can_be_no_folder_is_refused(
        output: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """Before the model is opened, in one message, and nothing is touched."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("mine")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "results").touch()
    write_rows(tmp_path / "a.parquet", questions(3))
    assert main(["run", "--input=a.parquet", f"--output={output}", "--model=/no/model/is/opened"]) == USER_ERROR
    err = capsys.readouterr().err
    assert re.search(message, err.splitlines()[-1])
    assert "Traceback" not in err
    assert (tmp_path / "taken").read_text() == "mine"


def test_end_ids_replace_the_models_own(model: Path, tmp_path: Path) -> None:
    """Case 30: the ids that end an answer may be given for a run; the model's then do not end one."""
    write_rows(tmp_path / "a.parquet", questions(6))
    plain, other = tmp_path / "plain", tmp_path / "other"
    flags = ("--max-tokens=60",)
    assert main(run_flags(tmp_path / "a.parquet", plain, model, *flags)) == OK
    ended = [row for row in published(plain) if row["finish_reason"] == "stop"]
    assert ended
    wanted = published(plain)[0]["token_ids"][1]
    assert main(run_flags(tmp_path / "a.parquet", other, model, *flags, f"--eos-ids={wanted}")) == OK
    first, *rest = published(other)
    assert (first["token_ids"][-1], first["finish_reason"]) == (wanted, "stop")
    assert all(row["token_ids"][-1] == wanted or row["finish_reason"] == "length" for row in rest)


def test_what_has_no_effect_or_no_room_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings of the model's authors that are not applied, and a KV memory under one full context: a line each."""
    model = write_fake_folder(tmp_path / "fake")
    settings = {"eos_token_id": 256, "repetition_penalty": 1.5}
    (model / "generation_config.json").write_text(json.dumps(settings))
    write_rows(tmp_path / "a.parquet", [*questions(3), {"uuid": "big", "prompt": "x", "max_tokens": 900}])
    output = tmp_path / "out"
    assert main(run_flags(tmp_path / "a.parquet", output, model, "--kv-memory=3KiB")) == ROWS_FAILED
    err = capsys.readouterr().err
    assert err.count("sets repetition_penalty=1.5: without effect here") == 1
    assert re.search(r"the KV memory holds \d+ tokens of one row, the context limit is 1024", err)
    assert report(output)["not_applied"] == ["repetition_penalty=1.5"]
    [failure] = published(output, "failures")
    assert (failure["code"], failure["prompt_head"]) == ("CAPACITY_EXCEEDED", "x")


def test_the_engines_figures_are_kept(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens, pages, evictions, times, and the batch fill over time; equal rows are all counted at the end."""
    rows = questions(12)
    write_rows(tmp_path / "a.parquet", [*rows, rows[4]])
    assert main(run_flags(tmp_path / "a.parquet", tmp_path / "out", model)) == OK
    figures = engine_figures(tmp_path / "out")
    for name in ("prefilled_tokens", "generated_tokens", "pages_peak", "pages_total", "last_row_seconds",
                 "load_seconds"):
        assert figures[name] > 0, name
    assert (figures["evictions"], figures["holds"], figures["recomputed_tokens"]) == (0, 0, 0)
    assert figures["unreadable_samples"] == 0
    assert figures["timeline"][-1]["rows"] == 13
    assert "13/13 rows" in capsys.readouterr().err


def test_an_engine_that_breaks_ends_the_job(
        model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 1, and the last line names what the model raised."""
    def broken(self: FakeModel, *arguments: object) -> NoReturn:
        raise ArithmeticError("the head broke")

    monkeypatch.setattr(FakeModel, "head", broken)
    write_rows(tmp_path / "a.parquet", questions(3))
    assert main(run_flags(tmp_path / "a.parquet", tmp_path / "out", model)) == FATAL
    last = capsys.readouterr().err.splitlines()[-1]
    assert "the job stopped" in last
    assert "the head broke" in last
    assert not (tmp_path / "out" / "_SUCCESS").exists()


def test_any_other_fault_shows_where_it_came_from(
        model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 1 with a traceback and one last line, whatever the exception."""
    def broken(*arguments: object, **named: object) -> NoReturn:
        raise LookupError("no such summary")

    monkeypatch.setattr(launch, "show_summary", broken)
    write_rows(tmp_path / "a.parquet", questions(3))
    assert main(run_flags(tmp_path / "a.parquet", tmp_path / "out", model)) == FATAL
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1] == "batchgen-beam: the job stopped: no such summary"
