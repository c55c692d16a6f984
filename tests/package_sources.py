"""The package's source files as module names and parsed trees, for the tests that hold structure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "batchgen_beam"
LINKED = ("models", "pipelines")


def source_files() -> dict[str, Path]:
    """Module name → real file.  The two linked folders count under their import names, each file once."""
    found: dict[str, Path] = {}
    for folder, prefix in [(ROOT / PACKAGE, PACKAGE), *((ROOT / name, f"{PACKAGE}.{name}") for name in LINKED)]:
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder)
            if folder.name == PACKAGE and relative.parts[0] in LINKED:
                continue
            found[".".join((prefix, *relative.with_suffix("").parts)).removesuffix(".__init__")] = path
    return found


def sources() -> dict[str, str]:
    """Module name → source text."""
    return {name: path.read_text(encoding="utf-8") for name, path in source_files().items()}


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
