"""The Airflow example under the real Airflow, which has an environment of its own: `make test-airflow`."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchgen_beam.pipelines import main
from batchgen_beam.text.fake_folder import write_fake_folder
from tests.package_sources import ROOT
from tests.support.jobs import FLAGS, published, questions, report, write_rows

EXAMPLE = ROOT / "examples" / "airflow"


def airflow(home: Path, command: str, *runs: str) -> dict[str, Any]:
    """What `check_dag` says."""
    python = os.environ["BATCHGEN_AIRFLOW_PYTHON"]
    done = subprocess.run(
        [python, ROOT / "tests" / "airflow" / "check_dag.py", EXAMPLE, command, *runs], check=False,
        capture_output=True, text=True, cwd=home,
        env={**os.environ, "AIRFLOW_HOME": str(home), "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
             "PYTHONPATH": str(ROOT)})
    facts = [line for line in done.stdout.splitlines() if line.startswith("FACTS ")]
    assert facts, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(facts[-1].removeprefix("FACTS "))
    return found


def test_the_example_knows_the_exit_codes() -> None:
    """The numbers in the example are the command's own."""
    (numbers,) = re.findall(r"^OK, USER_ERROR, ROWS_FAILED, INTERRUPTED = (.*)$",
                            (EXAMPLE / "batchgen_daily.py").read_text(), re.M)
    assert numbers == f"{main.OK}, {main.USER_ERROR}, {main.ROWS_FAILED}, {main.INTERRUPTED}"


def test_the_cron_line_is_a_command_that_parses() -> None:
    """Five fields of time, then a command whose flags the command line takes."""
    from batchgen_beam.pipelines.options import parse_options

    (line,) = [text for text in (EXAMPLE / "crontab").read_text().splitlines() if not text.startswith("#")]
    words = shlex.split(" ".join(line.split()[5:]))
    flags = words[words.index("run") + 1:words.index(">>")]
    options = parse_options(flags)
    assert (options.allow_failures, options.output) == (True, "answers")
    assert re.match(r"0 3 \* \* \* ", line)


@pytest.mark.airflow
@pytest.mark.timeout(900)
def test_the_dag_parses_and_its_task_reads_exit_codes(tmp_path: Path) -> None:
    """3 succeeds, 2 fails for good, 130 and every other code are tried again."""
    script = tmp_path / "code.sh"
    script.write_text("exit $2\n")
    found = airflow(tmp_path, f"sh {script}", "0", "3", "2", "130", "1", "137")
    assert found["import_errors"] == {}
    assert found["task"] == ["BatchgenRun", "answer_new_prompts", 3]
    assert (found["catchup"], found["max_active_runs"]) == (False, 1)
    assert found["outcomes"] == [0, 3, "AirflowFailException", *["AirflowException"] * 3]


@pytest.mark.airflow
@pytest.mark.timeout(900)
def test_an_absent_command_is_not_tried_again(tmp_path: Path) -> None:
    """Waiting does not install it."""
    assert airflow(tmp_path, "/no/such/batchgen-beam", "")["outcomes"] == ["AirflowFailException"]


@pytest.mark.airflow
@pytest.mark.timeout(900)
def test_each_day_costs_what_is_new(tmp_path: Path) -> None:
    """The task runs the real command; on the second day the first day's file is not published again."""
    model = write_fake_folder(tmp_path / "model")
    flags = f"--input '{tmp_path}/in/*/*.parquet' --output '{tmp_path}/out' --model '{model}' {' '.join(FLAGS)}"
    command = f"{sys.executable} -m batchgen_beam.pipelines.main"
    write_rows(tmp_path / "in" / "monday" / "a.parquet", questions(5))
    assert airflow(tmp_path, command, flags)["outcomes"] == [main.OK]
    (first,) = (tmp_path / "out" / "results").rglob("rg-*.parquet")
    before = first.stat().st_mtime_ns
    write_rows(tmp_path / "in" / "tuesday" / "b.parquet", [*questions(3, start=5), {"uuid": "bad", "prompt": ""}])
    assert airflow(tmp_path, command, flags)["outcomes"] == [main.ROWS_FAILED]
    assert first.stat().st_mtime_ns == before
    assert len(published(tmp_path / "out")) == 8
    assert report(tmp_path / "out")["counts"]["rows"] == 9
