"""The README says what the code does: commands, columns, codes and flags are compared with their sources."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from batchgen_beam.errors import ErrorCode
from batchgen_beam.kernels.choice import ISA
from batchgen_beam.kernels.native_library import ON_REQUEST_PATHS, PATHS
from batchgen_beam.pipelines.main import OK, main
from batchgen_beam.pipelines.options import OPTIONS
from batchgen_beam.settings import PARAMETER_COLUMNS
from batchgen_beam.storage.schemas import FAILURE_SCHEMA, RESULT_SCHEMA
from tests.package_sources import ROOT, sources
from tests.readme_commands import README, blocks, commands


@pytest.fixture(scope="module")
def text() -> str:
    """The README."""
    return README.read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """The part below a heading."""
    (body,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return str(body)


def first_cells(part: str) -> list[str]:
    """The code words in the first column of the part's tables."""
    return re.findall(r"^\| `([^`]+)`", part, re.M)


def test_the_two_commands_come_first(text: str) -> None:
    """A reader who copies the first block gets the demo and the tests."""
    assert commands(text)[:2] == ["make demo", "make test"]


def test_ci_runs_the_readme_and_everything_else_is_marked(text: str) -> None:
    """Every command is either executed by .ci/run as it stands, or marked as not run there."""
    assert "tests/readme_commands.py" in (ROOT / ".ci" / "run").read_text()
    for before, body in blocks(text, "console"):
        assert "not run by CI" in before + body


def test_only_known_kinds_of_block(text: str) -> None:
    """Commands hide in no block that is not looked at."""
    fences = re.findall(r"^```(\w*)$", text, re.M)[::2]
    assert set(fences) <= {"bash", "console", "text"}


def test_continued_lines_and_comments() -> None:
    """A backslash joins lines; comments and other blocks are no commands."""
    sample = "Do:\n\n```bash\n# first\na --b \\\n  --c   # why\nd\n```\n\n```text\ne\n```\n"
    assert commands(sample) == ["a --b --c", "d"]


def test_every_failure_code_is_explained(text: str) -> None:
    """The table of codes is the enumeration, in its order."""
    assert first_cells(section(text, "Result columns")) == [str(code) for code in ErrorCode]


def test_codes_that_no_code_gives_are_marked_as_reserved(text: str) -> None:
    """A code is reserved exactly as long as nothing in the package names it but its own definition."""
    package = [source for name, source in sources().items() if name != "batchgen_beam.errors"]
    unused = [code for code in ErrorCode if not any(re.search(rf"ErrorCode\.{code}\b", source) for source in package)]
    assert re.findall(r"^\| `(\w+)` \|.*\(reserved\) \|$", section(text, "Result columns"), re.M) == unused


@pytest.mark.smollm2
@pytest.mark.timeout(300)
def test_the_printed_example_is_what_the_commands_print(
        text: str, smollm2_gguf: Path, smollm2_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    """The example's command gives an answer for each printed id, in that order, and the printed failures to the letter.

    The answers' words are those of one processor; another one may round other logits to the top.
    """
    [line] = [line for line in commands(text) if "--output out/reviews" in line]
    changed = {".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf": str(smollm2_gguf), "out/reviews": str(tmp_path)}
    arguments = [changed.get(word, word) for word in shlex.split(line)[1:]]
    monkeypatch.chdir(ROOT)
    assert main([*arguments, f"--model-cache={smollm2_folder.parent}"]) == OK
    capsys.readouterr()
    runpy.run_path("examples/show_results.py")["show"](tmp_path, ["ticket_id"])
    shown = capsys.readouterr().out.splitlines()
    [printed] = [body.splitlines() for _, body in blocks(text, "text") if "review-00" in body]
    assert len(shown) == len(printed) == 20
    assert shown[-2:] == printed[-2:]
    answer = re.compile(r'(\S+) +(?:length|stop) +".+"')
    ids = [[found[1] for found in map(answer.fullmatch, lines[:-2]) if found] for lines in (shown, printed)]
    assert ids[0] == ids[1]
    assert len(ids[0]) == 18


def test_the_printed_plan_is_what_the_command_prints(text: str, monkeypatch: pytest.MonkeyPatch,
                                                     capsys: pytest.CaptureFixture[str]) -> None:
    """To the letter: a plan is a function of the configuration, the profile and the flags."""
    [line] = [line for line in commands(text) if "batchgen-beam plan" in line]
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(line)[1:]) == OK
    [printed] = [body for _, body in blocks(text, "text") if "parameters" in body]
    assert capsys.readouterr().out.splitlines() == printed.splitlines()


def test_result_and_failure_columns_are_the_schemas(text: str) -> None:
    """The columns are listed as they are published, in order."""
    results, failures, *_ = [part for part in section(text, "Result columns").split("\n\n") if part.strip()]
    named = re.findall(r"`([a-z_]+)`", results)
    assert [name for name in named if name in RESULT_SCHEMA.names] == RESULT_SCHEMA.names
    assert re.findall(r"`([a-z_]+)`", failures) == FAILURE_SCHEMA.names


def test_every_parameter_column_is_explained(text: str) -> None:
    """The table of input columns holds every column that is read."""
    assert set(first_cells(section(text, "Input columns"))) == {
        "uuid", "prompt", "messages", "token_ids", *PARAMETER_COLUMNS}


def test_every_instruction_path_is_listed(text: str) -> None:
    """From the lowest to the highest; those that are taken on request only say so."""
    kernels = section(text, "Kernels")
    assert first_cells(kernels) == list(PATHS)
    asked = tuple(re.findall(rf"^\| `(\w+)` \|.*only `{ISA}` takes it.*\|$", kernels, re.M))
    assert asked == ON_REQUEST_PATHS


def test_every_flag_is_listed_with_its_default(text: str) -> None:
    """The table of flags is the command line's own table."""
    assert flag_table() in text


def flag_table() -> str:
    """The flags as Markdown."""
    lines = ["| flag | default | meaning |", "|---|---|---|"]
    for option in OPTIONS:
        flag = f"{option.flag} {option.value}".strip()
        default = "" if option.default in (None, ()) else f"`{option.default}`"
        lines.append(f"| `{flag}` | {default} | {option.help} |")
    return "\n".join(lines)


def test_named_files_exist(text: str) -> None:
    """Files that the README links to are there."""
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
        assert Path(ROOT / target).exists(), target
