"""Laws of the choice of kernels: native where it can be, torch with a reason where not, and always the same path."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from batchgen_beam.errors import OptionError
from batchgen_beam.kernels import choice
from batchgen_beam.kernels.choice import ISA, TIMED, choose_kernels, settle_threads
from batchgen_beam.kernels.native_library import HALF_PATHS, ON_REQUEST_PATHS, PATHS, arithmetic
from batchgen_beam.kernels.native_set import NativeKernels
from batchgen_beam.kernels.self_test import AttentionShape, ExpertShape, ModelShapes
from batchgen_beam.models.interface import KernelSet
from tests.kernels.sets import NATIVE, NEEDS_NATIVE

pytestmark = NEEDS_NATIVE

HERE = [path for dtype, path in NATIVE if dtype is torch.bfloat16]
COMMON = [path for path in HERE if path not in ON_REQUEST_PATHS]


def shapes(size: int = 64, inputs: int = 576) -> ModelShapes:
    """A model with heads of `size` values."""
    attention = (AttentionShape(heads=9, kv_heads=3, size=size),)
    return ModelShapes(linear=((960, inputs),), head=(1000, inputs), norms=(), activations=(), attention=attention)


def chosen(cache: Path, model: ModelShapes | None = None, *, wanted: str = "auto", isa: str | None = None,
           dtype: torch.dtype = torch.bfloat16) -> KernelSet:
    """What would run here."""
    return choose_kernels(dtype, model or shapes(), wanted=wanted, threads=2, cache=cache,
                          environment={} if isa is None else {ISA: isa})


def test_native_is_taken_where_it_can_be(tmp_path: Path) -> None:
    """`auto` and `native` give the native set, `torch` the torch set."""
    assert [chosen(tmp_path, wanted=wanted).name for wanted in ("auto", "native", "torch")] == [
        "native", "native", "torch"]


def test_torch_keeps_one_thread_beside_a_set_with_its_own(tmp_path: Path) -> None:
    """The native set computes on its own threads whatever torch has; the torch set on torch's, which it keeps."""
    before = torch.get_num_threads()
    try:
        for wanted, left in (("torch", 2), ("native", 1)):
            torch.set_num_threads(2)
            kernels = chosen(tmp_path, wanted=wanted)
            settle_threads(kernels)
            assert (torch.get_num_threads(), kernels.threads) == (left, 2)
    finally:
        torch.set_num_threads(before)


def special(experts: ExpertShape | None = None, **keys: Any) -> ModelShapes:
    """A model with something that only the torch set computes."""
    attention = (AttentionShape(heads=8, kv_heads=1, size=64, **keys),)
    return ModelShapes(linear=(), head=(1000, 64), norms=(), activations=(), attention=attention, experts=experts)


@pytest.mark.parametrize(("model", "reason"), [
    (special(value_size=48), "latent attention"),
    (special(ExpertShape(count=8, chosen=2, size=64, inner=63)), "odd number of inputs"),
    (shapes(size=24), "heads of 24 values are no multiple of 16"),
    (shapes(inputs=577), "odd number of inputs"),
    (ModelShapes(linear=(), head=(9, 9), norms=(), activations=(), attention=()), "no attention"),
], ids=["latent", "experts", "heads", "inputs", "attention"])
def test_a_model_that_does_not_fit_runs_on_torch(tmp_path: Path, caplog: pytest.LogCaptureFixture, model: ModelShapes,
                                                 reason: str) -> None:
    """`auto` takes torch and says why in one line; `native` refuses with the same reason and a remedy."""
    with caplog.at_level(logging.INFO):
        assert chosen(tmp_path, model).name == "torch"
    assert [reason in message for message in caplog.messages] == [True]
    with pytest.raises(OptionError, match=f"--kernels=native: .*{reason}.*; use --kernels=auto"):
        chosen(tmp_path, model, wanted="native")


def test_experts_and_sinks_run_natively(tmp_path: Path) -> None:
    """Sparse models with grouped attention are no reason to leave the native set."""
    model = special(ExpertShape(count=8, chosen=2, size=64, inner=64), sinks=True, window=128)
    assert chosen(tmp_path, model, wanted="native").name == "native"


def test_keys_and_values_are_kept_as_the_flag_says(tmp_path: Path) -> None:
    """By either set; a model without keys and values can't keep them as int8."""
    for wanted in ("native", "torch"):
        for kv_dtype, kept in (("auto", torch.bfloat16), ("int8", torch.int8)):
            kernels = choose_kernels(torch.bfloat16, shapes(), wanted=wanted, threads=2, cache=tmp_path,
                                     kv_dtype=kv_dtype, environment={})
            assert (kernels.name, kernels.kv_dtype) == (wanted, kept)
    none = ModelShapes(linear=(), head=(9, 9), norms=(), activations=(), attention=())
    with pytest.raises(OptionError, match="--kv-dtype=int8: the model keeps no keys and values"):
        choose_kernels(torch.bfloat16, none, wanted="auto", threads=2, cache=tmp_path, kv_dtype="int8")


def told(caplog: pytest.LogCaptureFixture, cache: Path, model: ModelShapes | None = None,
         **keys: Any) -> list[tuple[str, str]]:
    """Levels and texts of what is said while torch is chosen."""
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert chosen(cache, model, **keys).name == "torch"
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def test_without_the_library_torch_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                            caplog: pytest.LogCaptureFixture) -> None:
    """One warning with the library's reason and remedy, or a refusal with both; who asks for torch is not warned."""
    monkeypatch.setattr(choice, "absence", lambda: "there is no library: build it")
    assert told(caplog, tmp_path) == [("WARNING", "torch kernels: there is no library: build it")]
    assert [level for level, _ in told(caplog, tmp_path, wanted="torch")] == ["INFO"]
    with pytest.raises(OptionError, match=r"^--kernels=native: there is no library: build it; use --kernels=auto$"):
        chosen(tmp_path, wanted="native")


def test_a_path_for_kernels_that_have_none_is_said_to_do_nothing(tmp_path: Path,
                                                                 caplog: pytest.LogCaptureFixture) -> None:
    """Whether torch is asked for or the model asks for it: a warning by the variable's name."""
    none = f"; {ISA}={HERE[0]} has no effect on them"
    assert told(caplog, tmp_path, wanted="torch", isa=HERE[0]) == [
        ("WARNING", f"torch kernels: --kernels=torch asks for them{none}")]
    ((level, text),) = told(caplog, tmp_path, special(value_size=48), isa=HERE[0])
    assert level == "WARNING"
    assert text.endswith(none)
    assert [level for level, _ in told(caplog, tmp_path, special(value_size=48))] == ["INFO"]


def path_of(kernels: KernelSet) -> str:
    """The instruction path."""
    assert isinstance(kernels, NativeKernels)
    return kernels.path


@pytest.mark.parametrize("path", HERE)
def test_the_environment_forces_a_path(tmp_path: Path, path: str) -> None:
    """Any path that this machine has; nothing is timed or remembered."""
    assert path_of(chosen(tmp_path, isa=path)) == path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wanted", ["auto", "native", "torch"])
@pytest.mark.parametrize("model", [shapes(), special(value_size=48)], ids=["native", "torch"])
def test_an_unknown_path_is_refused(tmp_path: Path, wanted: str, model: ModelShapes) -> None:
    """By the variable's name, with those that there are, whatever would compute."""
    with pytest.raises(OptionError, match=f"{ISA}=amx9 is no instruction path; give one of {', '.join(PATHS)}"):
        chosen(tmp_path, model, wanted=wanted, isa="amx9")


def test_a_path_that_this_machine_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it has unasked."""
    monkeypatch.setattr(choice, "arithmetic", lambda path, half: path == HERE[0] or None)
    with pytest.raises(OptionError, match=f"{ISA}={PATHS[-1]} is no instruction path of this machine; .*{HERE[0]}$"):
        chosen(tmp_path, isa=PATHS[-1])


def test_a_path_of_bfloat16_alone_leaves_float32_its_own(tmp_path: Path) -> None:
    """The highest paths exist for bfloat16 only: forcing one does not refuse a float32 run."""
    for path in HALF_PATHS:
        assert path_of(chosen(tmp_path, isa=path, dtype=torch.float32)) not in HALF_PATHS


def test_paths_of_which_there_is_no_run_are_taken_on_request_only(tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has, `auto` takes one of the others."""
    monkeypatch.setattr(choice, "ON_REQUEST_PATHS", tuple(HERE[1:]))
    assert path_of(chosen(tmp_path)) == HERE[0]
    assert path_of(chosen(tmp_path, isa=HERE[-1])) == HERE[-1]


def test_paths_on_request_are_not_even_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for one asks the operating system to change the process: only the one that the environment names is."""
    looked: list[str] = []

    def look(path: str, *, half: bool) -> int | None:
        looked.append(path)
        return None if path in ON_REQUEST_PATHS else arithmetic(path, half=half)

    monkeypatch.setattr(choice, "arithmetic", look)
    chosen(tmp_path)
    chosen(tmp_path, isa=COMMON[0])
    assert set(looked) == set(PATHS) - set(ON_REQUEST_PATHS)
    for path in ON_REQUEST_PATHS:
        with pytest.raises(OptionError, match=f"{ISA}={path} is no instruction path of this machine"):
            chosen(tmp_path, isa=path)
        assert path in looked


@pytest.mark.skipif(not set(TIMED) <= set(HERE), reason="this machine has only one of the paths that are timed")
def test_the_timing_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first choice is kept beside the model cache and counts from then on, whatever a later timing would say."""
    first = path_of(chosen(tmp_path / "cache"))
    (kept,) = (tmp_path / "cache").iterdir()
    assert json.loads(kept.read_text()) == {"path": first}
    other = next(path for path in TIMED if path != first)
    monkeypatch.setattr(choice, "_faster", lambda dtype: other)
    assert path_of(chosen(tmp_path / "cache")) == first


@pytest.mark.skipif(not set(TIMED) <= set(HERE), reason="this machine has only one of the paths that are timed")
@pytest.mark.parametrize("broken", [b"torn", b"", b"[]", b"null", b"7", b'{"path": 7}', b'{"path": ["avx512"]}',
                                    b'{"path": {}}', b'{"path": "avx2"}', b'{}', b"\xff\xfe"])
def test_a_broken_choice_is_made_again_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bytes) -> None:
    """What can't be read is no choice: the file is replaced, so that the next timing is not asked again."""
    chosen(tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(broken)
    for faster in TIMED:
        monkeypatch.setattr(choice, "_faster", lambda dtype, faster=faster: faster)
        assert path_of(chosen(tmp_path)) == TIMED[0]
    assert json.loads(kept.read_text()) == {"path": TIMED[0]}
    assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.skipif(not set(TIMED) <= set(HERE), reason="this machine has only one of the paths that are timed")
def test_a_cache_that_cannot_be_written_is_no_fault(tmp_path: Path) -> None:
    """A file where the folder should be: the timing is simply not kept."""
    (tmp_path / "cache").write_text("")
    assert path_of(chosen(tmp_path / "cache")) in PATHS
