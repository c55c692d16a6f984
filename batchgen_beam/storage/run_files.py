"""The files that say what an output folder is: `fingerprint.json`, `run.json`, `_SUCCESS`, and `_runs/`.

Owns their names, contents and order of writing.  Does not know Beam's transforms or how counts are made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batchgen_beam.errors import OutputError
from batchgen_beam.records import Fingerprint
from batchgen_beam.storage.files import check_store, exists, join, list_below, read_bytes, remove, write_atomically
from batchgen_beam.storage.published import remove_published
from batchgen_beam.storage.totals import RunTotals

__all__ = ["FINGERPRINT_FILE", "RUN_FILE", "RUN_VERSION", "SUCCESS_FILE", "check_output", "engine_file", "finish_run",
           "read_fingerprint", "read_passes", "read_report", "reported_runs", "run_report", "start_run",
           "write_engine_figures", "write_pass"]

FINGERPRINT_FILE = "fingerprint.json"
RUN_FILE = "run.json"
RUNS_FOLDER = "_runs"
SUCCESS_FILE = "_SUCCESS"
RUN_VERSION = 1
_JSON = ".json"


def start_run(output: str, fingerprint: Fingerprint, *, new_fingerprint: bool = False) -> None:
    """Claim the output folder for this content print, and take `_SUCCESS` away until the run is done.

    A folder made under another print is refused with an `OutputError` that names the differing facts;
    `new_fingerprint` instead removes what was published there.
    """
    if not new_fingerprint:
        check_output(output, fingerprint)
    remove(join(output, SUCCESS_FILE))
    if read_fingerprint(output) not in (None, fingerprint):
        remove_published(output)
    write_atomically(join(output, FINGERPRINT_FILE), _json_bytes(
        {"version": RUN_VERSION, "digest": fingerprint.digest, "facts": dict(fingerprint.facts)}))


def check_output(output: str, fingerprint: Fingerprint) -> None:
    """Refuse a folder that was made under another print; touches nothing."""
    previous = read_fingerprint(output)
    if previous not in (None, fingerprint):
        raise OutputError(_refusal(output, fingerprint.differences(previous)))


def _refusal(output: str, differences: list[str]) -> str:
    lines = "\n".join(f"  {line}" for line in differences)
    return (f"output {output} holds answers computed from other content:\n{lines}\n"
            "Choose another --output, or pass --new-fingerprint to replace those answers")


def read_fingerprint(output: str) -> Fingerprint | None:
    """The content print that the folder was made under; None where there is none yet.

    An `OutputError` says that the folder's store can't be used here, or that the file is damaged.
    """
    check_store(output, OutputError)
    path = join(output, FINGERPRINT_FILE)
    if not exists(path):
        return None
    try:
        return Fingerprint.of(json.loads(read_bytes(path))["facts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OutputError(f"{path} is damaged ({error!r}); choose another --output, or delete the file "
                          "if the folder's answers may be replaced") from error


def run_report(run: str, facts: Mapping[str, object], totals: RunTotals) -> dict[str, object]:
    """What `run.json` says: the run's name, what the caller knows about it, and the counts."""
    return {"version": RUN_VERSION, "run": run, **facts, "counts": totals.as_facts()}


def finish_run(output: str, report: Mapping[str, object]) -> None:
    """Write `_runs/<run>.json`, then `run.json`, then `_SUCCESS`: whoever sees the last sees the others.

    `_SUCCESS` names the run: Beam can't write an empty object to S3.
    """
    data = _json_bytes(report)
    write_atomically(join(output, RUNS_FOLDER, f"{report['run']}.json"), data)
    write_atomically(join(output, RUN_FILE), data)
    write_atomically(join(output, SUCCESS_FILE), f"{report['run']}\n".encode())


def read_report(output: str, run: str) -> dict[str, Any]:
    """What `_runs/<run>.json` says."""
    report: dict[str, Any] = json.loads(read_bytes(join(output, RUNS_FOLDER, f"{run}.json")))
    return report


def _pass_file(output: str, run: str, number: int) -> str:
    return join(output, RUNS_FOLDER, f"{run}.pass-{number:04d}.json")


def write_pass(output: str, run: str, number: int, totals: RunTotals) -> None:
    """Store what one pass of a run has come to, apart from its units."""
    write_atomically(_pass_file(output, run, number), _json_bytes(totals.as_facts()))


def read_passes(output: str, run: str, count: int) -> RunTotals:
    """What all passes of a run have come to together; a part of the journal that none could read is one problem."""
    parts = [RunTotals.from_facts(json.loads(read_bytes(_pass_file(output, run, number))))
             for number in range(1, count + 1)]
    problems = max((part.journal_problems for part in parts), default=0)
    return replace(RunTotals.sum(parts), journal_problems=problems)


def reported_runs(output: str) -> frozenset[str]:
    """The runs that have ended: those with a report."""
    names = (name.removesuffix(_JSON) for name in list_below(join(output, RUNS_FOLDER), f"*{_JSON}"))
    return frozenset(name for name in names if "." not in name)


def engine_file(output: str, run: str) -> str:
    """The path of what the run's engines did."""
    return join(output, RUNS_FOLDER, f"{run}.engine.json")


def write_engine_figures(output: str, run: str, figures: Mapping[str, object]) -> None:
    """Write what the launcher alone knows once the workers have ended; the run's reports stay as they are."""
    write_atomically(engine_file(output, run), _json_bytes(figures))


def _json_bytes(value: Mapping[str, object]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
