"""`batchgen-beam bench`: steps of the numbers of rows that were asked for, and where their time goes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from batchgen_beam.kernels.native_library import PARTS
from batchgen_beam.pipelines.main import OK, USER_ERROR, main
from batchgen_beam.text.fake_folder import write_fake_folder
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
