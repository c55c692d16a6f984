"""Laws of the prints: what decides the answers is in the content print, where a model lies is not."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from batchgen_beam.errors import OptionError
from batchgen_beam.records import Fingerprint
from batchgen_beam.settings import GenerationDefaults
from batchgen_beam.text.fake_folder import write_fake_folder
from batchgen_beam.text.template import TemplateText
from batchgen_beam.transforms.model_folder import ModelFolder
from batchgen_beam.transforms.prints import TEMPLATE_CLOCK, content_print, numeric_print

DAY = datetime(2026, 1, 2, tzinfo=UTC)


def _print(folder: Path, *, dtype: str = "float32", kv_dtype: str = "auto", clock: datetime = DAY,
           template: Path | None = None, max_context: int | None = None, eos_ids: tuple[int, ...] | None = None,
           **defaults: float) -> Fingerprint:
    own = None if template is None else TemplateText.of_file(template)
    model = ModelFolder.open(folder, template=own, clock=clock, max_context=max_context, eos_ids=eos_ids)
    return content_print(model, GenerationDefaults(**defaults), dtype=dtype, kv_dtype=kv_dtype,
                         clock=clock.date().isoformat())


def test_the_same_model_elsewhere_is_the_same_content(tmp_path: Path) -> None:
    """Neither the path nor the day is part of the print, where the template does not ask for it."""
    here, there = write_fake_folder(tmp_path / "here"), write_fake_folder(tmp_path / "there")
    assert _print(here) == _print(there, clock=datetime(2027, 5, 5, tzinfo=UTC))


def test_each_thing_that_decides_answers_changes_the_print(tmp_path: Path) -> None:
    """Every such change is named by the fact that it changes."""
    folder = write_fake_folder(tmp_path / "base")
    base = _print(folder)
    other = write_fake_folder(tmp_path / "other", eos_every=25)
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[0]['content'] }}")
    changes = {
        "model_config": _print(other), "template": _print(folder, template=template),
        "context_limit": _print(folder, max_context=100), "eos_ids": _print(folder, eos_ids=(3, 2)),
        "dtype": _print(folder, dtype="bfloat16"), "kv_dtype": _print(folder, kv_dtype="int8"),
        **{name: _print(folder, **{name: value}) for name, value in (
            ("temperature", 0.5), ("top_k", 3), ("top_p", 0.5), ("seed", 1), ("max_tokens", 7), ("logprobs", 2))},
    }
    for name, changed in changes.items():
        [difference] = changed.differences(base)
        assert difference.startswith(f"{name}: ")
    tokenizer = folder / "tokenizer_config.json"
    tokenizer.write_text(json.dumps(json.loads(tokenizer.read_text()) | {"add_bos_token": False}))
    assert [line.partition(":")[0] for line in _print(folder).differences(base)] == ["tokenizer"]


def test_a_template_that_asks_for_the_date_puts_it_into_the_print(tmp_path: Path) -> None:
    """Another day is other content then, and the day can be read back."""
    template = "{{ strftime_now('%d %B %Y') }}{{ messages[0]['content'] }}"
    folder = write_fake_folder(tmp_path / "dated", template=template)
    one, other = _print(folder), _print(folder, clock=datetime(2026, 1, 3, tzinfo=UTC))
    assert dict(one.facts)[TEMPLATE_CLOCK] == "2026-01-02"
    assert {line.partition(":")[0] for line in one.differences(other)} == {TEMPLATE_CLOCK, "template"}


def test_a_failed_self_test_shows_in_the_numeric_print() -> None:
    """Answers of kernels that are not deterministic never pass for others'."""
    facts = {"kernels": "torch", "threads": 2}
    assert numeric_print(facts, deterministic=True) != numeric_print(facts, deterministic=False)


def test_what_means_the_same_is_the_same_content(tmp_path: Path) -> None:
    """Both spellings of `off`, a default that is named, the order of ids."""
    folder = write_fake_folder(tmp_path / "base")
    assert _print(folder, top_k=-1) == _print(folder, top_k=0) == _print(folder, temperature=1.0) == _print(folder)
    assert _print(folder, eos_ids=(5, 3, 5)) == _print(folder, eos_ids=(3, 5)) != _print(folder)


def test_end_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    """They could never end an answer."""
    folder = write_fake_folder(tmp_path / "base")
    with pytest.raises(OptionError, match="--eos-ids: 258 is outside the model's vocabulary of 258 ids"):
        _print(folder, eos_ids=(2, 258))
