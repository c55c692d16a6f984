"""Laws of loading the native library: one that can't be used is named in a warning, with the reason and a remedy."""

from __future__ import annotations

import ctypes
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from batchgen_beam.kernels import native_library
from batchgen_beam.kernels.native_library import INTERFACE, library
from tests.kernels.sets import NEEDS_NATIVE


def load(monkeypatch: pytest.MonkeyPatch, place: str) -> object:
    """Load the library from another place, without what is remembered."""
    monkeypatch.setattr(native_library, "find_spec", lambda name: ModuleSpec(name, None, origin=place))
    return library.__wrapped__()


def test_a_file_that_is_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                   caplog: pytest.LogCaptureFixture) -> None:
    """The loader's own words are passed on."""
    place = tmp_path / "_native.so"
    place.write_text("nothing")
    assert load(monkeypatch, str(place)) is None
    assert len(caplog.messages) == 1
    assert "invalid ELF header" in caplog.messages[0] or "file too short" in caplog.messages[0]
    assert "python setup.py build_ext --inplace" in caplog.messages[0]


@NEEDS_NATIVE
def test_a_library_of_another_release(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Both interface numbers are named."""
    found = library()
    assert isinstance(found, ctypes.CDLL)
    monkeypatch.setattr(native_library, "INTERFACE", INTERFACE + 1)
    assert load(monkeypatch, found._name) is None
    assert f"has interface {INTERFACE}, this release needs {INTERFACE + 1}" in caplog.messages[0]


def test_no_library_is_no_fault(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An installation that never had one says nothing here: the choice of kernels does."""
    monkeypatch.setattr(native_library, "find_spec", lambda name: None)
    assert library.__wrapped__() is None
    assert not caplog.messages
