"""Laws of loading the native library: one that can't be used is named, with the reason and a remedy."""

from __future__ import annotations

import ctypes
import ctypes.util
from pathlib import Path

import pytest

from batchgen_beam.kernels import native_library
from batchgen_beam.kernels.native_library import INTERFACE, absence, library, open_library
from tests.kernels.sets import NEEDS_NATIVE

HERE = "linux", "x86_64"
BUILD = "reinstall the package, or in a checkout run `python setup.py build_ext --inplace`, where a C++ compiler is"


def reason(place: str | None, system: str = "linux", machine: str = "x86_64") -> str:
    """Why there is no library at a place."""
    found = open_library(place, system, machine)
    assert isinstance(found, str)
    return found


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    """The loader's own words are passed on."""
    place = tmp_path / "_native.so"
    place.write_text("nothing")
    found = reason(str(place))
    assert found.startswith(f"{place} can't be loaded (")
    assert "invalid ELF header" in found or "file too short" in found
    assert found.endswith(BUILD)


def test_a_library_of_others() -> None:
    """One without our functions: the one that is missing is named."""
    found = reason(ctypes.util.find_library("c") or "libc.so.6")
    assert "bg_interface" in found
    assert found.endswith(BUILD)


@NEEDS_NATIVE
def test_a_library_of_another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both interface numbers are named."""
    found = library()
    assert isinstance(found, ctypes.CDLL)
    monkeypatch.setattr(native_library, "INTERFACE", INTERFACE + 1)
    told = reason(found._name)
    assert f"{found._name} has interface {INTERFACE}, this release needs {INTERFACE + 1}: " in told
    assert told.endswith(BUILD)


def test_a_library_that_was_not_built() -> None:
    """The remedy is a compiler."""
    assert reason(None, *HERE) == f"the native library was not built for this installation: {BUILD}"


@pytest.mark.parametrize(("system", "machine"), [("darwin", "arm64"), ("linux", "aarch64"), ("win32", "AMD64")])
def test_a_machine_that_can_have_none(system: str, machine: str) -> None:
    """No compiler helps there: torch is named instead."""
    told = reason(None, system, machine)
    assert f"need Linux on x86-64, this is {system} on {machine}" in told
    assert "--kernels=torch" in told
    assert "setup.py" not in told


def test_there_is_a_library_or_a_reason() -> None:
    """Never both, never neither."""
    assert (library() is None) == (absence() is not None)


@NEEDS_NATIVE
@pytest.mark.parametrize(("status", "error", "text"), [
    (1, MemoryError, "no memory"), (2, RuntimeError, "lower the number of threads"),
    (3, RuntimeError, "ended bg_linear with status 3"), (-1, RuntimeError, "ended bg_linear with status -1")])
def test_a_call_that_did_not_do_its_work_raises(status: int, error: type[Exception], text: str) -> None:
    """Whatever status it ends with; one that nobody knows is named."""
    found = library()
    assert found is not None
    with pytest.raises(error, match=text):
        found.bg_linear.errcheck(status, found.bg_linear, ())
    assert found.bg_linear.errcheck(0, found.bg_linear, ()) is None
