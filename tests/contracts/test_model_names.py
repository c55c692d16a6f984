"""Laws of `batchgen_beam/config/model_name_utils.py`, and of bare names in `load_config`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from batchgen_beam.config.model_name_utils import is_glm5_backend_model, is_kimi_k25_backend_model
from batchgen_beam.config.model_registry import get_registered_models, load_config

MODEL_TYPES = {"glm5": {"glm_moe_dsa"}, "gemma3": {"gemma3", "gemma3_text"}, "mistral": {"mistral", "mistral3"}}
"""Families of the table whose model types are named otherwise."""


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """A row of the table; `family` may be `unknown` (none of ours) or `config` (the name can't tell)."""

    identifier: str | None
    family: str
    glm5: bool
    kimi_k25: bool


def read_rows() -> list[NamedModel]:
    """All rows of identifiers.tsv."""
    lines = (Path(__file__).parent / "identifiers.tsv").read_text(encoding="utf-8").splitlines()
    cells = [line.split("\t") for line in lines[1:]]
    return [NamedModel(identifier=json.loads(c[0]), family=c[1], glm5=c[2] == "True", kimi_k25=c[3] == "True")
            for c in cells]


ROWS = read_rows()
BARE = [row for row in ROWS if re.fullmatch(r"\s*([\w.-]+/)?[\w.-]+(@\w+)?\s*", row.identifier or "", re.ASCII)]
OTHERS = [row for row in ROWS if row.identifier in ("GLM 5", "kimi k2.5", "\uff27\uff2c\uff2d-5", "GLM\u20115")]
EMPTY = [row for row in ROWS if not (row.identifier or "").strip()]
PATHS = [row for row in ROWS if re.search(r"^/|^\./|\\|://", row.identifier or "")]


def test_table_is_whole() -> None:
    """The table has 127 rows, and every one is a bare name, a path, empty, or no name at all."""
    assert len(ROWS) == 127
    parts = [BARE, PATHS, EMPTY, OTHERS]
    assert sum(map(len, parts)) == len({row for part in parts for row in part}) == 127


@pytest.mark.parametrize("row", ROWS, ids=lambda row: repr(row.identifier))
def test_flags(row: NamedModel) -> None:
    """Both flags follow their literal rule on every row of the table."""
    assert is_glm5_backend_model(row.identifier) is row.glm5
    assert is_kimi_k25_backend_model(row.identifier) is row.kimi_k25


@pytest.mark.parametrize(("name", "expected"), [
    (" GLM-5 ", True), ("zai-org/GLM-5.1-FP8", True), ("/m/glm_5-x", True), ("GLM51", True), ("chatglm5", True),
    (None, False), ("", False), ("  ", False), ("GLM-4.5", False), ("GLM 5", False), ("glm.5", False),
])
def test_glm5_examples(name: str | None, expected: bool) -> None:
    """Contains `glm-5`, `glm_5` or `glm5` after stripping and lower-casing; None counts as empty."""
    assert is_glm5_backend_model(name) is expected


@pytest.mark.parametrize(("name", "expected"), [
    ("moonshotai/Kimi-K2.5", True), ("/d/KIMI_K26-int4", True), ("kimi-k25-foo", True), ("kimi_k2.6", True),
    ("Kimi-K2-Instruct", False), ("Kimi-K2.7", False), ("Kimi-K3", False), ("kimi k2.5", False),
    ("kimik2.5", False), ("kimi-k2_5", False), (None, False), ("", False),
])
def test_kimi_examples(name: str | None, expected: bool) -> None:
    """Contains `kimi-` or `kimi_` directly followed by `k2.5`, `k25`, `k2.6` or `k26`."""
    assert is_kimi_k25_backend_model(name) is expected


@pytest.mark.parametrize("row", BARE, ids=lambda row: repr(row.identifier))
def test_bare_names(row: NamedModel) -> None:
    """A bare public name gives the defaults of its family, and a name of no family is refused by name."""
    assert row.identifier is not None
    if row.family in ("unknown", "config"):
        with pytest.raises(ValueError, match=re.escape(row.identifier.strip())):
            load_config(row.identifier)
        return
    config = load_config(row.identifier)
    assert config.model_type in MODEL_TYPES.get(row.family, {row.family})
    assert type(config) is get_registered_models()[config.model_type]
    assert config.name_or_path == row.identifier


@pytest.mark.parametrize("row", EMPTY, ids=lambda row: repr(row.identifier))
def test_empty_names(row: NamedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty text is refused, and never read as the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="empty"):
        load_config(row.identifier)  # type: ignore[arg-type]


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: ascii(row.identifier))
def test_texts_that_are_no_name(row: NamedModel) -> None:
    """Blanks inside and letters beyond ASCII make no public name."""
    assert row.identifier is not None
    with pytest.raises(ValueError, match="neither a folder nor a known model name"):
        load_config(row.identifier)


@pytest.mark.parametrize("row", PATHS, ids=lambda row: repr(row.identifier))
def test_paths_without_a_folder(row: NamedModel) -> None:
    """A path whose folder does not exist is refused, however familiar its last part looks."""
    assert row.identifier is not None
    with pytest.raises(ValueError, match=r"folder|can't be read"):
        load_config(row.identifier)
