"""The race's command line: `setup`, `run`, `report`, `workload`; see the package."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from batchgen_beam.transforms.resources import available_cores
from benchmarks.race import environments, model_forms
from benchmarks.race.bound import bound, shapes_of
from benchmarks.race.engines import ENGINES, PEERS, Engine, engines
from benchmarks.race.machine import machine
from benchmarks.race.process import ROOT, Conditions, Outcome, run_engine
from benchmarks.race.report import find_races, markdown, summary
from benchmarks.race.roofline import best
from benchmarks.race.schedule import race
from benchmarks.race.workloads import ACTIVE_ROWS, NAMES, Workload, generate, read, write

DEFAULT_MODEL = ".cache/models/SmolLM2-135M-Instruct.Q4_1.gguf"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _tokenizer(folder: Path) -> Callable[[str], list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def _workload(name: str, folder: Path, rows: int | None) -> Workload:
    """A file, or one of our own; its first `rows` rows."""
    file = Path(name)
    whole = read(file) if file.is_file() else generate(name, _tokenizer(folder))
    return Workload(name=whole.name, rows=whole.rows[:rows])


def setup(args: argparse.Namespace) -> None:
    """Environments, llama.cpp's server, and the model in each form."""
    peers = args.peers.split(",")
    unknown = set(peers) - set(PEERS)
    if unknown:
        raise SystemExit(f"unknown peers {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    args.home.mkdir(parents=True, exist_ok=True)
    for name in (environments.CHART, *(peer for peer in peers if peer != "llama_cpp")):
        environments.make_environment(args.home, name)
    if "llama_cpp" in peers:
        environments.make_llama_server(args.home, args.jobs)
    model_forms.prepare(args.model, args.model_cache, args.home, peers)
    _say(f"ready: {args.home}")


def _check(chosen: list[Engine], home: Path) -> None:
    for one in chosen:
        if one.environment == "llama_cpp":
            place = environments.server_of(home)
        elif one.environment != "project":
            place = environments.python_of(home, one.environment)
        else:
            continue
        if not place.exists():
            raise SystemExit(f"{one.name}: {place} is not there; run `setup --peers {one.environment}` first")


def _roofline(folder: Path, threads: int) -> dict[str, Any]:
    """The machine's rates, in a process of its own."""
    _say("measuring the machine")
    config = str((folder / "config.json").absolute())
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.race.roofline", config, str(threads)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the machine's rates could not be measured:\n{done.stderr}")
    rates: dict[str, Any] = json.loads(done.stdout)
    return rates


def _add_rates(report: dict[str, Any], workload: Workload, folder: Path) -> None:
    """Measure again, keep the best of all measurements, and the bound that follows."""
    shapes = shapes_of(json.loads((folder / "config.json").read_text()))
    settings, rates = report["settings"], _roofline(folder, report["settings"]["threads"])
    known = report.get("roofline", {"gemm": [], "read": []})
    gemm, reads = [*known["gemm"], *rates["gemm"]], [*known["read"], *rates["read"]]
    report["roofline"] = {"best": best(shapes, gemm, reads), "gemm": gemm, "read": reads}
    report["bound"] = bound(workload.rows, settings["active_rows"], shapes, report["roofline"]["best"]["flops"],
                            report["roofline"]["best"]["read"])


def _record(report: dict[str, Any], record: dict[str, Any], place: Path) -> None:
    """Append and write at once, so that an interrupted race keeps what it has."""
    report["runs"].append(record)
    if record["engine"].split(":")[0] == "ours" and "path" in record.get("facts", {}):
        report["machine"]["path"] = record["facts"]["path"]
    place.write_text(json.dumps(report, indent=1) + "\n")
    shown = f", {record['seconds']:.1f} s, others {100 * record['others_share']:.1f} %" if "seconds" in record else ""
    _say(f"{record['engine']} repeat {record['repeat']} attempt {record['attempt']}: {record['outcome']}{shown}")


def run(args: argparse.Namespace) -> None:
    """One race: all repeats of all engines on one workload."""
    chosen = {one.name: one for one in engines(args.engines)}
    once = {name for name in args.once.split(",") if name}
    if not once <= chosen.keys():
        raise SystemExit(f"--once {args.once}: not among the engines {', '.join(chosen)}")
    _check(list(chosen.values()), args.home)
    peers = {one.environment for one in chosen.values()} - {"project"}
    args.home.mkdir(parents=True, exist_ok=True)
    folder = model_forms.prepare(args.model, args.model_cache, args.home, sorted(peers))
    workload = _workload(args.workload, folder, args.rows)
    active = args.active_rows or ACTIVE_ROWS.get(workload.name, 256)
    logs = args.out / "runs"
    logs.mkdir(parents=True, exist_ok=True)
    conditions = Conditions(home=args.home, folder=folder, out=logs, threads=args.threads, cores=os.cpu_count() or 1,
                            active_rows=active, kv_gib=args.kv_gib, limit=args.limit, warm_gib=args.warm_gib)
    report: dict[str, Any] = {
        "format": 1, "workload": workload.facts(), "machine": machine(), "model": folder.name, "runs": [],
        "settings": {"repeats": args.repeats, "retries": args.retries, "limit_seconds": args.limit,
                     "most_others": args.most_others, "active_rows": active, "threads": args.threads,
                     "kv_gib": args.kv_gib, "warm_gib": args.warm_gib}}
    if args.roofline:
        _add_rates(report, workload, folder)

    def start(name: str, repeat: int, attempt: int) -> Outcome:
        plain = name.replace(":", "_").replace("=", "-")
        return run_engine(chosen[name], workload, conditions, f"{workload.name}-{plain}-{repeat}-{attempt}")

    place = args.out / f"race-{workload.name}.json"
    for record in race(list(chosen), repeats=args.repeats, retries=args.retries, most_others=args.most_others,
                       run=start, once=once):
        _record(report, record, place)
    if args.roofline:
        _add_rates(report, workload, folder)
    place.write_text(json.dumps(report, indent=1) + "\n")
    _show([report], args.home, args.out / f"race-{workload.name}.png")


def _panel(one: dict[str, Any]) -> dict[str, Any]:
    """What the picture shows of one race."""
    facts = one["workload"]
    return {"title": f"{facts['name']}: {facts['rows']} rows, {facts['output_tokens']} output tokens",
            "bound": one["bound"]["sum_seconds"] if "bound" in one else None,
            "bars": [{"engine": figures["engine"], "median": figures["median_seconds"],
                      "least": figures["least_seconds"], "most": figures["most_seconds"]}
                     for figures in summary(one) if "median_seconds" in figures]}


def _show(races: list[dict[str, Any]], home: Path, picture: Path) -> None:
    """Print the tables and draw the picture, if its environment is there."""
    print(markdown(races))
    python = environments.python_of(home, environments.CHART)
    if not python.exists():
        _say(f"no picture: {python} is not there, run `setup`")
        return
    with tempfile.NamedTemporaryFile("w", suffix=".json") as data:
        json.dump([_panel(one) for one in races], data)
        data.flush()
        command = [str(python), str(Path(__file__).with_name("chart.py")), data.name, str(picture)]
        done = subprocess.run(command, check=False)
    _say(f"picture: {picture}" if done.returncode == 0 else "no picture")


def report(args: argparse.Namespace) -> None:
    """Tables and one picture of all races in these folders."""
    races = find_races(args.folders)
    if not races:
        raise SystemExit("no race-*.json in " + ", ".join(str(folder) for folder in args.folders))
    _show(races, args.home, args.folders[0] / "races.png")


def workload_file(args: argparse.Namespace) -> None:
    """Write one of our own workloads."""
    folder = model_forms.prepare(args.model, args.model_cache, args.home, ())
    write(generate(args.name, _tokenizer(folder)), args.out)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.race", description=__doc__)
    parser.add_argument("--home", type=Path, default=Path(".cache/race"), help="environments and forms of the model")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="a GGUF file (or a folder, without OpenVINO, llama.cpp)")
    parser.add_argument("--model-cache", type=Path, default=Path(".cache/models"))
    commands = parser.add_subparsers(required=True)
    making = commands.add_parser("setup", help="make the peers' environments")
    making.add_argument("--peers", default=",".join(PEERS))
    making.add_argument("--jobs", type=int, default=available_cores(), help="compilers at once")
    making.set_defaults(call=setup)
    running = commands.add_parser("run", help="race on one workload")
    running.add_argument("--workload", required=True, help=f"a JSONL file, or one of {', '.join(NAMES)}")
    running.add_argument("--engines", default="ours,openvino,openvino-u8,vllm,vllm-compiled,llama_cpp",
                         help=f"of {', '.join(ENGINES)}; NAME:setting=value for other settings")
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--rows", type=int, help="only the first N rows")
    running.add_argument("--repeats", type=int, default=3)
    running.add_argument("--once", default="", help="those of the engines that run in the first repeat only")
    running.add_argument("--retries", type=int, default=3, help="of a run that other processes disturbed")
    running.add_argument("--most-others", type=float, default=0.05, help="share of the CPU that others may use")
    running.add_argument("--active-rows", type=int, help="rows at once (256; for W4 128)")
    running.add_argument("--kv-gib", type=int, default=2, help="memory for keys and values")
    running.add_argument("--warm-gib", type=int, default=6, help="memory that is touched before each process")
    running.add_argument("--threads", type=int, default=available_cores())
    running.add_argument("--limit", type=float, default=900, help="seconds of one process")
    running.add_argument("--roofline", action=argparse.BooleanOptionalAction, default=True)
    running.set_defaults(call=run)
    reporting = commands.add_parser("report", help="all tables from the files of earlier runs")
    reporting.add_argument("folders", nargs="+", type=Path)
    reporting.set_defaults(call=report)
    writing = commands.add_parser("workload", help="write one of the workloads")
    writing.add_argument("name", choices=NAMES)
    writing.add_argument("--out", type=Path, required=True)
    writing.set_defaults(call=workload_file)
    return parser


def main() -> None:
    """Parse and do."""
    args = _parser().parse_args()
    try:
        args.call(args)
    except ValueError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
