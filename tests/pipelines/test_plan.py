"""`batchgen-beam plan`: what it says of machines that are not here agrees with arithmetic, and of this one with its
flags."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from batchgen_beam.engine.device_profile import load_profile, profile_names
from batchgen_beam.pipelines.main import OK, USER_ERROR, main
from batchgen_beam.pipelines.options import parse_options
from batchgen_beam.pipelines.request import RunRequest
from batchgen_beam.text.fake_folder import write_fake_folder
from tests.config.test_sizes import R1
from tests.faults.job import write_tiny_model
from tests.support.jobs import write_rows

GB = 10**9
WORK = ["--rows=10000", "--prompt-tokens=500", "--output-tokens=500"]
TABLE = ("weights always needed", "weights of layers", "buffers for weights", "keys and values", "workspace of a pass",
         "together")


@pytest.fixture
def r1(tmp_path: Path) -> Path:
    """DeepSeek-R1's config.json, and nothing else."""
    (tmp_path / "config.json").write_text(json.dumps(R1))
    return tmp_path / "config.json"


def plan(capsys: pytest.CaptureFixture[str], *flags: object) -> str:
    """What is written."""
    assert main(["plan", *map(str, flags)]) == OK
    return capsys.readouterr().out


def table(text: str) -> dict[str, list[int]]:
    """Bytes of each line, tier by tier."""
    return {line[:28].strip(): [int(number.replace(",", "")) for number in line[28:].split()]
            for line in text.splitlines() if line[:28].strip() in (*TABLE, "there are")}


def number(pattern: str, text: str) -> float:
    """The number in the first place that a pattern marks."""
    found = re.search(pattern, text)
    assert found, (pattern, text)
    return float(found[1].replace(",", ""))


def blocks(outputs: int, inputs: int) -> int:
    """Bytes of an fp8 weight: a byte each, and a float32 for each started block of 128 x 128."""
    return outputs * inputs + 4 * -(-outputs // 128) * -(-inputs // 128)


EXPERT = 2 * blocks(2048, 7168) + blocks(7168, 2048)
ATTENTION = (blocks(1536, 7168) + blocks(128 * 192, 1536) + blocks(576, 7168) + blocks(128 * 256, 512)
             + blocks(7168, 128 * 128) + 2 * (7168 + 1536 + 512))
ROUTED = 2 * 256 * 7168 + 4 * 256 + 2 * 7168 + EXPERT
"""What of a sparse layer every token passes: router, correction, norm, shared expert."""
DENSE = 2 * blocks(18432, 7168) + blocks(7168, 18432) + 2 * 7168
AROUND = 2 * 2 * 129280 * 7168 + 2 * 7168
TOTAL = 61 * ATTENTION + 3 * DENSE + 58 * (ROUTED + 256 * EXPERT) + AROUND
ROW = 61 * 16 * 64 * 576 * 2
"""A row of 1,000 tokens: 16 pages of 64, of 576 bfloat16 in 61 layers."""


@pytest.mark.parametrize(("name", "devices", "memory", "host"), [
    ("a5000", 1, 24 * GB, "1TB"), ("h100_sxm", 8, 640 * GB, "2TB")])
def test_deepseek_r1_from_its_config_alone(name: str, devices: int, memory: int, host: str, r1: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    """Every tier's bytes are the sums written out above; budgets hold; the price is that of the time."""
    text = plan(capsys, "--model", r1, "--device-profile", name, "--devices", devices, "--host-memory", host, *WORK,
                "--price-per-hour=10")
    rows, found = table(text), int(number(r"once for ([\d,]+) rows", text))
    assert f"{TOTAL:,} bytes as they are stored (fp8)" in text
    assert load_profile(name).name in text
    for tier in range(2):
        assert sum(rows[line][tier] for line in TABLE[:-1]) == rows["together"][tier] <= rows["there are"][tier]
    assert rows["there are"] == [memory, int(host[0]) * 1000 * GB]
    copied = (devices - 1) * 61 * ATTENTION
    assert rows["weights always needed"][0] + sum(rows["weights of layers"]) == TOTAL + copied
    assert found * ROW in rows["keys and values"]
    pieces, buffers = (int(number(pattern, text)) for pattern in (r"in (\d+) pieces", r"through (\d+) buffers"))
    largest = ATTENTION + ROUTED + 256 * EXPERT if "; with their attention" in text else 256 * EXPERT
    assert devices == 1 or "; without their attention" in text
    assert rows["buffers for weights"][0] == buffers * -(-largest // pieces)
    assert number(r"([\d.]+) billion parameters", text) == 671.0
    hours = 10_000 * 500 / number(r"([\d,]+) answer tokens/s", text) / 3600
    assert number(r"([\d.,]+) at 10 an hour", text) == pytest.approx(10 * hours, rel=0.01)


@pytest.mark.parametrize(("flags", "named"), [
    (["--device-profile=a5000", "--device-memory=4GB"], "device"),
    (["--device-profile=h100_sxm", "--devices=8"], "host"),
    (["--device-profile=h100_sxm", "--devices=8", "--host-memory=2TB", "--weight-memory=1GB"], "weight"),
])
def test_what_can_not_fit_is_refused_with_the_numbers(flags: list[str], named: str, r1: Path,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and what is needed of which memory, with its flag."""
    assert main(["plan", f"--model={r1}", *WORK, *flags]) == USER_ERROR
    said = capsys.readouterr().err
    assert re.search(rf"weights take {TOTAL:,} bytes, and no plan fits: the least one needs .*[\d,]+ bytes of {named} "
                     rf"memory \(there are [\d,]+\).*; raise .*--{named}-memory", said)


def test_profiles_say_where_their_figures_are_from() -> None:
    """Those of the package name their data sheets, and what is in none."""
    assert profile_names() == ("a5000", "h100_sxm")
    for name in profile_names():
        assert "data sheet" in load_profile(name).source
        assert "not in the data sheet" in load_profile(name).assumed


def test_this_machine_is_planned_with_what_a_run_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The layers of a small model are timed; rows and mean of an input are found; the printed flags are run's."""
    model = write_tiny_model(tmp_path / "tiny")
    write_rows(tmp_path / "in.parquet", [{"prompt": "x" * 40}] * 30, row_group_size=10)
    text = plan(capsys, f"--model={model}", f"--model-cache={tmp_path}", f"--input={tmp_path}/in.parquet",
                "--output-tokens=20", "--device-memory=1GiB", "--kernels=torch", "--dtype=float32", "--threads=1")
    prompt = number(r"30 rows, prompts of (\d+) and answers of 20 tokens", text)
    assert 40 <= prompt <= 41
    assert "this machine: torch kernels, 1 thread," in text
    assert "all 2 layers in memory" in text
    assert table(text)["there are"] == [1 << 30]
    flags = re.findall(r"^run with +(.*)$", text, re.M)[0].split()
    request = RunRequest.of(parse_options(["--input=a", "--output=b", f"--model={model}", *flags]))
    assert (request.engine.dtype, request.engine.kernels, request.engine.threads) == ("float32", "torch", 1)
    assert request.engine.max_rows == number(r"once for (\d+) rows", text) == 30
    assert request.engine.kv_memory == table(text)["keys and values"][0]


def test_a_plan_that_streams_says_so_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With less memory for weights than they take, `run` is given what the plan puts there, which is within it."""
    model = write_tiny_model(tmp_path / "tiny")
    flags = [f"--model={model}", f"--model-cache={tmp_path}", "--rows=8", "--prompt-tokens=20", "--output-tokens=4",
             "--device-memory=1GiB", "--kernels=torch", "--dtype=float32", "--threads=1"]
    whole = table(plan(capsys, *flags))
    limit = whole["weights always needed"][0] + int(0.9 * whole["weights of layers"][0])
    text = plan(capsys, *flags, f"--weight-memory={limit}")
    found = re.findall(r"^run with +(.*)$", text, re.M)[0].split()
    request = RunRequest.of(parse_options(["--input=a", "--output=b", f"--model={model}", *found]))
    rows = table(text)
    assert rows["weights of layers"][1] > 0
    assert request.engine.weight_memory == sum(
        rows[name][0] for name in ("weights always needed", "weights of layers", "buffers for weights")) <= limit


def test_only_what_differs_from_the_defaults_is_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`run` is given the arithmetic that was planned, and no flag that it would take anyway."""
    model = write_tiny_model(tmp_path / "tiny")
    flags = [f"--model={model}", f"--model-cache={tmp_path}", "--rows=8", "--prompt-tokens=20", "--output-tokens=4",
             "--device-memory=1GiB"]
    said = [re.findall(r"^run with +(.*)$", plan(capsys, *flags, *own), re.M)[0].split()
            for own in (["--kernels=torch", "--kv-dtype=int8"], ["--kernels=auto", "--dtype=bfloat16", "--threads=0"])]
    assert said[0][:2] == ["--kv-dtype=int8", "--kernels=torch"]
    assert not {"--dtype", "--kv-dtype", "--kernels", "--threads"} & {flag.partition("=")[0] for flag in said[1]}


def test_a_weight_memory_of_0_is_no_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To the plan as to `run`: all layers in memory."""
    model = write_tiny_model(tmp_path / "tiny")
    text = plan(capsys, f"--model={model}", f"--model-cache={tmp_path}", "--rows=8", "--prompt-tokens=20",
                "--output-tokens=4", "--device-memory=1GiB", "--kernels=torch", "--dtype=float32", "--threads=1",
                "--weight-memory=0")
    assert "all 2 layers in memory" in text


def broken(**changes: Any) -> str:
    """A device profile with other values, as JSON."""
    profile = {"name": "x", "source": "y", "flops": 1e12, "memory_bandwidth": 1e11, "memory": GB, "to_device": 1e9,
               "to_host": 1e9, "between_devices": 1e9, "disk": 1e9, **changes}
    return json.dumps({key: value for key, value in profile.items() if value is not None})


@pytest.mark.parametrize(("profile", "message"), [
    (broken(flops=0), "flops must be over 0"), (broken(memory=None), "memory"), (broken(memory="much"), "memory"),
    ("[]", "profile.json"), ("{", "profile.json")])
def test_device_profiles_that_are_none(profile: str, message: str, r1: Path,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    """What is wrong with the file is named."""
    place = r1.with_name("profile.json")
    place.write_text(profile)
    assert main(["plan", f"--model={r1}", *WORK, f"--device-profile={place}"]) == USER_ERROR
    assert message in capsys.readouterr().err


def test_a_profile_of_ones_own(r1: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file of the same form describes any device."""
    place = r1.with_name("profile.json")
    place.write_text(broken(name="a box of mine", memory=2000 * GB))
    text = plan(capsys, f"--model={r1}", "--rows=4", "--prompt-tokens=5", "--output-tokens=5",
                f"--device-profile={place}")
    assert "1 x a box of mine" in text
    assert "all 61 layers in memory" in text


@pytest.mark.parametrize(("flags", "message"), [
    ([], "--model is missing"),
    (["--model=MODEL"], "--rows, --prompt-tokens, --output-tokens: not given"),
    (["--model=MODEL", "--rows=0"], "--rows: '0' is no whole number from 1 on"),
    (["--model=MODEL", *WORK, "--price-per-hour=-1"], "'-1' is no price"),
    (["--model=MODEL", *WORK, "--device-profile=abacus"], "neither a file that can be read nor one of a5000, h100_sxm"),
    (["--model=MODEL", *WORK, "--host-memory=1GB"], "this machine has one memory"),
    (["--model=MODEL", *WORK[:2], "--output-tokens=163341"], "are more than the model's context of 163,840"),
    (["--model=MODEL", *WORK, "--device-profile=a5000", "--speed=3"], "unrecognized arguments: --speed=3"),
])
def test_mistakes_are_named(flags: list[str], message: str, r1: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is timed."""
    assert main(["plan", *(flag.replace("MODEL", str(r1)) for flag in flags)]) == USER_ERROR
    assert message in capsys.readouterr().err


def test_a_model_whose_sizes_are_not_known_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No plan is made on guesses."""
    model = write_fake_folder(tmp_path / "fake")
    assert main(["plan", f"--model={model}", "--rows=1", "--prompt-tokens=1", "--output-tokens=1"]) == USER_ERROR
    assert "sizes of model type 'batchgen_fake' are not known" in capsys.readouterr().err
