"""What a linter does not hold: sizes, the number of broad excepts, docstrings, where Beam finds our classes."""

from __future__ import annotations

import ast
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchgen_beam.text.fake_folder import write_fake_folder
from tests.package_sources import PACKAGE, ROOT, functions, sources
from tests.support.jobs import questions, run_flags, write_rows

FILE_LINES = 400
NATIVE_FILE_LINES = 600
NATIVE_LINE = 120
MEDIAN_FILE_LINES = 200
FUNCTION_LINES = 60
NINE_IN_TEN = 30
MEDIAN_FUNCTION_LINES = 12
BROAD_EXCEPTS = ["batchgen_beam.engine.driver", "batchgen_beam.transforms.row_boundary"]
"""The engine's thread, which hands the exception to its waiters, and the row boundary."""


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def broad_excepts(source: str) -> Iterator[int]:
    """Line numbers of handlers that catch everything or `Exception`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            if any(kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds):
                yield node.lineno


def prints(source: str) -> Iterator[int]:
    """Line numbers of calls of `print` and of writes to the standard streams."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write", "sys.stderr.write"):
            yield node.lineno


def test_no_file_is_long() -> None:
    """Every file has at most 400 lines, and the median file far fewer."""
    lines = {name: source.count("\n") for name, source in sources().items()}
    assert {name: count for name, count in lines.items() if count > FILE_LINES} == {}
    assert statistics.median(lines.values()) <= MEDIAN_FILE_LINES


def test_no_native_file_or_line_is_long() -> None:
    """C++ files have at most 600 lines of at most 120 characters."""
    files = {path.name: path.read_text(encoding="utf-8").splitlines()
             for path in (ROOT / PACKAGE / "kernels" / "native").iterdir()}
    assert len(files) > 10
    assert {name: len(lines) for name, lines in files.items() if len(lines) > NATIVE_FILE_LINES} == {}
    assert [f"{name}:{i}" for name, lines in files.items()
            for i, line in enumerate(lines, 1) if len(line) > NATIVE_LINE] == []


def test_no_function_is_long() -> None:
    """Functions: none over 60 lines, nine in ten at most 30, the median at most 12."""
    lengths = {f"{name}:{function.name}": length(function)
               for name, source in sources().items() for function in functions(ast.parse(source))}
    assert {name: count for name, count in lengths.items() if count > FUNCTION_LINES} == {}
    ordered = sorted(lengths.values())
    assert ordered[len(ordered) * 9 // 10] <= NINE_IN_TEN
    assert statistics.median(ordered) <= MEDIAN_FUNCTION_LINES


def test_at_most_two_broad_excepts() -> None:
    """A broad except hides faults: the package has two, and what they do is in their docstrings."""
    found = [name for name, source in sources().items() for _ in broad_excepts(source)]
    assert sorted(found) == BROAD_EXCEPTS


def test_a_broad_except_is_found_in_every_form() -> None:
    """Bare, `Exception`, `BaseException`, and within a tuple; a narrow one is not."""
    handlers = ("except:", "except Exception:", "except BaseException as e:", "except (OSError, Exception):")
    assert all(list(broad_excepts(f"try:\n  f()\n{handler}\n  g()")) == [3] for handler in handlers)
    assert list(broad_excepts("try:\n  f()\nexcept (OSError, ValueError):\n  g()")) == []


def test_every_module_says_what_it_owns() -> None:
    """Every module begins with a docstring."""
    missing = [name for name, source in sources().items() if not ast.get_docstring(ast.parse(source))]
    assert missing == []


def test_only_the_pipelines_print() -> None:
    """Below the command line nothing writes to the terminal."""
    found = [f"{name}:{line}" for name, source in sources().items()
             if not name.startswith(f"{PACKAGE}.pipelines") for line in prints(source)]
    assert found == []


@pytest.mark.timeout(120)
def test_beam_finds_our_classes_by_their_package_name(tmp_path: Path) -> None:
    """All that the command hands to Beam is pickled by reference into `batchgen_beam`, from a checkout's root too."""
    write_rows(tmp_path / "a.parquet", questions(3))
    arguments = run_flags(tmp_path / "a.parquet", tmp_path / "out", write_fake_folder(tmp_path / "model"))
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.pickled_modules", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    steps = {f"{PACKAGE}.transforms.{name}" for name in ("read", "prepare", "lanes", "generate", "route", "publish")}
    assert steps <= set(found["job"])
    assert [module for module in found["job"] if module.split(".")[0] != PACKAGE] == []
    assert found["strays"] == ["__main__", "pipelines.options"]
