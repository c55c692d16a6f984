"""Imports point one way only: the layer table, and which foreign libraries a layer may know."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping

import pytest

from tests.package_sources import LINKED, PACKAGE, ROOT, source_files, sources

LAYERS = {
    "errors": "0", "record_codec": "0", "records": "0", "settings": "0", "batch_order": "0", "config": "0",
    "models": "1",
    "weights": "2",
    "engine": "3a", "kernels": "3a", "text": "3b",
    "storage": "4",
    "transforms": "5",
    "pipelines": "6",
}

NEVER = {
    ("storage", "models"): "storage knows no model",
    ("storage", "engine"): "storage knows no engine",
    ("storage", "kernels"): "storage knows no engine",
    ("text", "models"): "text knows no tensor",
}
"""Part → part: forbidden although the layers would allow it."""

ARCHITECTURE_FREE = ("transforms", "pipelines")
"""They reach models through the loader, and may name `models.interface` only."""

FOREIGN = {
    "torch": ("models", "weights", "engine", "kernels", "transforms"),
    "safetensors": ("weights",),
    "gguf": ("weights",),
    "tokenizers": ("text",),
    "jinja2": ("text",),
    "pyarrow": ("storage", "transforms", "pipelines"),
    "fsspec": ("config", "weights", "storage", "transforms"),
    "apache_beam": ("storage", "transforms", "pipelines"),
    "numpy": ("models", "weights", "engine", "kernels", "text", "storage", "transforms"),
}
"""The run-time libraries, and the parts that may import them; any other foreign library is refused."""

STORAGE_BEAM = ("apache_beam.io.filesystem", "apache_beam.io.filesystems")


def imports(source: str) -> Iterator[str]:
    """Full dotted names that a source imports, wherever the statement stands; relative ones begin with a dot."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def part_of(module: str) -> str:
    """`batchgen_beam.engine.sampler` → `engine`; the package itself → ``."""
    return [*module.split("."), ""][1]


def own_fault(module: str, target: str) -> str | None:
    """Why `module` may not import `target` of the package."""
    ours, theirs = part_of(module), part_of(target)
    if not ours or ours == theirs:
        return None
    if theirs not in LAYERS:
        return f"{theirs} is in no layer" if theirs else None
    mine, other = LAYERS[ours], LAYERS[theirs]
    if other[0] > mine[0] or (other[0] == mine[0] and other != mine):
        return f"layer {mine} may not import layer {other}"
    if ours in ARCHITECTURE_FREE and theirs == "models" and not target.startswith(f"{PACKAGE}.models.interface"):
        return "architectures are unknown here"
    return NEVER.get((ours, theirs))


def foreign_fault(module: str, target: str) -> str | None:
    """Why `module` may not import the foreign name `target`."""
    library, part = target.split(".")[0], part_of(module)
    if library in sys.stdlib_module_names:
        return None
    if library not in FOREIGN:
        return f"{library} is no declared run-time library"
    if part not in FOREIGN[library]:
        return f"{part or PACKAGE} does not know {library}"
    if library == "apache_beam" and part == "storage" and not target.startswith(STORAGE_BEAM):
        return "storage uses Beam's file systems only"
    return None


def fault(module: str, target: str) -> str | None:
    """Why the import is refused, or None."""
    if target.startswith("."):
        return "relative import"
    if target.split(".")[0] in LINKED:
        return "import it as part of the package"
    if target.split(".")[0] == PACKAGE:
        private = [name for name in target.split(".") if name.startswith("_") and not name.startswith("__")]
        return f"{private[0]} is private" if private else own_fault(module, target)
    return foreign_fault(module, target)


def violations(files: Mapping[str, str]) -> list[str]:
    """One line for each refused import of the given modules."""
    found = []
    for module, source in files.items():
        for target in imports(source):
            reason = fault(module, target)
            if reason:
                found.append(f"{module} imports {target}: {reason}")
    return sorted(set(found))


def test_every_import_points_to_its_own_layer_or_a_lower_one() -> None:
    """No file of the package imports upwards, sideways between 3a and 3b, or a library that its layer does not know."""
    assert violations(sources()) == []


def test_every_file_of_the_package_belongs_to_a_layer() -> None:
    """A new folder or file at the top of the package has to be given a layer here."""
    assert {part_of(module) for module in source_files()} - {""} <= LAYERS.keys()


@pytest.mark.parametrize(("module", "statement"), [
    ("batchgen_beam.models.llama", "from batchgen_beam.kernels.torch_set import TorchKernels"),
    ("batchgen_beam.engine.engine", "from batchgen_beam.text import tokenizer"),
    ("batchgen_beam.text.prepare", "import batchgen_beam.engine.engine"),
    ("batchgen_beam.storage.schemas", "from batchgen_beam.engine.engine import Engine"),
    ("batchgen_beam.storage.schemas", "from batchgen_beam import models"),
    ("batchgen_beam.storage.schemas", "import apache_beam as beam"),
    ("batchgen_beam.transforms.host", "from batchgen_beam.models.llama import LlamaModel"),
    ("batchgen_beam.records", "import torch"),
    ("batchgen_beam.records", "def late() -> None:\n    import apache_beam"),
    ("batchgen_beam.text.prepare", "import torch.nn.functional as F"),
    ("batchgen_beam.engine.engine", "import pyarrow as pa"),
    ("batchgen_beam.weights.loader", "import requests"),
    ("batchgen_beam.weights.loader", "from . import shards"),
    ("batchgen_beam.transforms.host", "from models.llama import LlamaModel"),
    ("batchgen_beam.pipelines.main", "from batchgen_beam.transforms.host import _engines"),
])
def test_a_wrong_import_is_found(module: str, statement: str) -> None:
    """Each kind of forbidden import is named, with the file it stands in."""
    found = violations({module: statement})
    assert len(found) == 1
    assert found[0].startswith(module)


@pytest.mark.parametrize("name", LINKED)
def test_links_into_the_package_are_relative_and_lead_to_real_files(name: str) -> None:
    """models/ and pipelines/ hold the files; the package reaches them by a committed relative link."""
    link = ROOT / PACKAGE / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../{name}"
    assert not (ROOT / name).is_symlink()
    assert not [path for path in (ROOT / name).rglob("*.py") if path.is_symlink()]
