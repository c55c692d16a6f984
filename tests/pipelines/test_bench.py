"""`batchgen-beam bench`: steps of the numbers of rows that were asked for, and where their time goes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from batchgen_beam.kernels.native_library import PARTS
from batchgen_beam.kernels.torch_set import TorchKernels
from batchgen_beam.pipelines.main import OK, USER_ERROR, main
from batchgen_beam.text.fake_folder import write_fake_folder
from batchgen_beam.transforms.timed_engine import formats_of
from tests.faults.job import write_tiny_model
from tests.kernels.sets import NEEDS_NATIVE


def lines(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Words of the lines that were written."""
    return [line.split() for line in capsys.readouterr().out.splitlines() if line]


def test_a_line_for_each_number_of_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The parts that are told sum up to the step."""
    model = write_fake_folder(tmp_path / "fake", eos_every=0)
    assert main(["bench", str(model), "--rows=1,3", "--context=80", f"--model-cache={tmp_path}"]) == OK
    what, header, one, three, prompts = lines(capsys)
    assert " ".join(what).endswith("rows end at 80 tokens")
    assert header[:3] == ["rows", "ms/step", "tokens/s"]
    assert [one[0], three[0]] == ["1", "3"]
    for line in (one, three):
        assert len(line) == len(header)
        assert all(float(number.replace(",", "")) >= 0 for number in line)
    assert re.fullmatch(r"[\d,]+", prompts[1])


@pytest.mark.parametrize(("kv_dtype", "said"), [("auto", "float32, torch"), ("int8", "float32, KV int8, torch")])
def test_what_keys_and_values_are_kept_in_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], kv_dtype: str,
                                                  said: str) -> None:
    """Beside the dtype where it is another one; the engine has the setting, and steps and prompts are timed."""
    model = write_tiny_model(tmp_path / "tiny")
    assert main(["bench", str(model), "--rows=2", "--context=80", f"--model-cache={tmp_path}", "--kernels=torch",
                 "--dtype=float32", f"--kv-dtype={kv_dtype}"]) == OK
    what, header, two, prompts = lines(capsys)
    assert " ".join(what).startswith(said)
    assert len(two) == len(header)
    assert float(two[1]) > 0
    assert prompts[0] == "prompts:"
    kernels = TorchKernels(torch.float32, kv_dtype=None if kv_dtype == "auto" else torch.int8)
    assert formats_of(kernels) == ("float32", kv_dtype)


def test_weights_are_streamed_under_a_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a run: the packed copy is made, the table has the same lines, and too low a limit is refused."""
    model = write_tiny_model(tmp_path / "tiny")
    flags = ["bench", str(model), "--rows=2", "--context=80", f"--model-cache={tmp_path}", "--kernels=torch",
             "--dtype=float32"]
    assert main([*flags, "--weight-memory=1"]) == USER_ERROR
    least = int(re.findall(r"at least ([\d,]+) bytes", capsys.readouterr().err)[0].replace(",", ""))
    assert main([*flags, f"--weight-memory={least}"]) == OK
    assert list(tmp_path.glob("packed-*/layer-*.packed"))
    _, header, two, prompts = lines(capsys)
    assert (two[0], len(two), prompts[0]) == ("2", len(header), "prompts:")


@NEEDS_NATIVE
@pytest.mark.smollm2
def test_native_kernels_tell_their_parts(smollm2_folder: Path, tmp_path: Path,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    """Every part takes some time, and together with the engine's they are the step."""
    assert main(["bench", str(smollm2_folder), "--rows=2", "--context=64", f"--model-cache={tmp_path}"]) == OK
    _, header, line, _ = lines(capsys)
    assert header[3:] == [*PARTS, "engine"]
    parts = dict(zip(header, map(float, line), strict=True))
    assert all(parts[part] > 0 for part in ("qkv", "attention", "out", "gate_up", "down", "head", "engine"))


@pytest.mark.parametrize(("flags", "message"), [
    (["--rows=0"], "--rows takes numbers of rows"), (["--rows=1,,2"], "--rows takes numbers of rows"),
    (["--context=5"], "--context must be between"), (["--context=99999"], "--context must be between"),
    (["--dtype=int3"], "use one of"), (["--steps=3"], "unrecognized"),
])
def test_mistakes_are_named(flags: list[str], message: str, tmp_path: Path,
                            capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong flag is the user's mistake."""
    assert main(["bench", str(write_fake_folder(tmp_path / "fake")), f"--model-cache={tmp_path}", *flags]) == USER_ERROR
    assert message in capsys.readouterr().err
