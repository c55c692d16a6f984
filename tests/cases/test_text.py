"""Faults of text handling that users reported against comparable systems."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from batchgen_beam.errors import CheckpointError, ErrorCode, OptionError, RowError
from batchgen_beam.records import FinishReason, InputRow, Outcome, Prompt, SamplingParams, TokenLogprobs
from batchgen_beam.settings import UNSUPPORTED_COLUMNS, GenerationDefaults
from batchgen_beam.text.detokenize import with_text
from batchgen_beam.text.model_files import ModelDefaults
from batchgen_beam.text.prepare import Preparer
from batchgen_beam.text.template import ChatTemplate, TemplateText, missing_template
from batchgen_beam.text.tokenizer import Tokenizer
from tests.text.tiny import (
    BOS,
    BOS_TEMPLATE,
    CHATML,
    CLOCK,
    EOS,
    byte_fallback,
    byte_level,
    preparer,
    row,
    save,
    with_bos,
    write_json,
)

BOTH = pytest.mark.parametrize("build", [byte_level, byte_fallback])
USER = [{"role": "user", "content": "the end"}]


def refusal(preparing: Preparer, given: InputRow) -> RowError:
    """How a row is refused."""
    with pytest.raises(RowError) as caught:
        preparing.prepare(given)
    return caught.value


def answer(ids: array[int], reason: FinishReason = FinishReason.LENGTH) -> Outcome:
    """An outcome of these ids."""
    logprobs = TokenLogprobs(chosen=array("f", [0.0] * len(ids)))
    return Outcome(key=row().key, token_ids=ids, finish_reason=reason, prompt_tokens=1, logprobs=logprobs,
                   params=SamplingParams(), content_print="c", numeric_print="n")


@BOTH
@pytest.mark.parametrize("text", ["😀👨‍👩‍👧", "안녕하세요", "e\u0301e\u0301", "日本語 the 日本語"])
def test_case_6_characters_of_many_tokens_stay_whole(tmp_path: Path, build: Callable[[], Backend], text: str) -> None:
    """Case 6: the final text is one decode of all ids, so a character that spans tokens never becomes U+FFFD."""
    tokenizer = save(tmp_path, build())
    ids = tokenizer.encode(text, add_bos=False)
    assert len(ids) > len(text)
    assert with_text(answer(ids), tokenizer, frozenset()).text == text


@BOTH
def test_case_6_a_truncated_last_character_does_no_harm_to_the_text_before(
        tmp_path: Path, build: Callable[[], Backend]) -> None:
    """Case 6: an answer that ends inside a character keeps all whole characters before it, and does not crash."""
    tokenizer = save(tmp_path, build())
    ids = tokenizer.encode("the 😀", add_bos=False)
    text = with_text(answer(ids[:-1]), tokenizer, frozenset()).text
    assert text is not None
    assert text.startswith("the ")
    assert set(text[4:]) <= {"\ufffd"}


@BOTH
@pytest.mark.parametrize("text", ["  the", " the  the", "the   ", "\n  the\n\n the", "a\u00a0 a"])
def test_case_7_spaces_survive(tmp_path: Path, build: Callable[[], Backend], text: str) -> None:
    """Case 7: leading and repeated spaces of a text are still there after encoding and one full decode."""
    tokenizer = save(tmp_path, build(), clean_up_tokenization_spaces=True)
    ids = tokenizer.encode(text, add_bos=False)
    assert with_text(answer(ids), tokenizer, frozenset()).text == text


@pytest.mark.parametrize("add_bos", [False, True])
def test_case_9_an_empty_prompt_is_a_failed_row(tmp_path: Path, add_bos: bool) -> None:
    """Case 9: an empty prompt is EMPTY_PROMPT, also where a BOS would be added; its neighbours are answered."""
    preparing = preparer(save(tmp_path, byte_level(), add_bos_token=add_bos))
    error = refusal(preparing, row(prompt=""))
    assert error.code is ErrorCode.EMPTY_PROMPT
    assert ("BOS" in error.message) == add_bos
    assert len(preparing.prepare(row(prompt="x")).token_ids) == 1 + add_bos
    assert refusal(preparing, row(token_ids=[])).code is ErrorCode.EMPTY_PROMPT


def test_case_11_a_prompt_that_is_too_long_is_a_failed_row_with_both_numbers(tmp_path: Path) -> None:
    """Case 11: a prompt that leaves no room for an answer is PROMPT_TOO_LONG and names its length and the limit."""
    preparing = preparer(save(tmp_path, byte_level()), context=16)
    assert len(preparing.prepare(row(prompt="x" * 15)).token_ids) == 15
    for given in (row(prompt="x" * 16), row(token_ids=[7] * 16), row(prompt="x" * 37)):
        error = refusal(preparing, given)
        assert error.code is ErrorCode.PROMPT_TOO_LONG
        length = len(given.values.get("prompt") or given.values["token_ids"])
        assert f"{length} tokens" in error.message
        assert "holds 16" in error.message


def test_case_17_what_a_template_refuses_is_a_failed_row_with_its_words(tmp_path: Path) -> None:
    """Case 17: a template's raise_exception fails its row, quoting the message; rows that it accepts go on."""
    source = ("{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
              + CHATML)
    preparing = preparer(save(tmp_path, byte_level()), source, context=200)
    error = refusal(preparing, row(messages=[{"role": "system", "content": "be nice"}, *USER]))
    assert error.code is ErrorCode.TEMPLATE_ERROR
    assert "System role not supported" in error.message
    assert preparing.prepare(row(messages=USER)).token_ids


def test_case_18_messages_without_a_template_are_refused_at_start(tmp_path: Path) -> None:
    """Case 18: a messages column needs a template; without one the run is refused, and a file of the user's helps."""
    save(tmp_path, byte_level())
    assert ChatTemplate.load(tmp_path, specials={}, clock=CLOCK) is None
    refusal_at_start = str(missing_template(column="messages", folder=tmp_path))
    assert re.search(r"'messages'.*no chat template.*--chat-template", refusal_at_start)
    own = tmp_path / "mine.jinja"
    own.write_text("{{ messages[0].content }}!", encoding="utf-8")
    loaded = ChatTemplate.load(tmp_path, specials={}, clock=CLOCK, own=TemplateText.of_file(own))
    assert loaded is not None
    assert loaded.render(USER) == "the end!"
    with pytest.raises(OptionError, match=r"absent\.jinja"):
        TemplateText.of_file(tmp_path / "absent.jinja")


@BOTH
def test_case_19_exactly_one_bos(tmp_path: Path, build: Callable[[], Backend]) -> None:
    """Case 19: ids begin with exactly one BOS for a prompt and for messages; one typed into a raw prompt is kept."""
    preparing = preparer(save(tmp_path, with_bos(build())), BOS_TEMPLATE)
    for given in (row(prompt="the"), row(prompt="<s>the"), row(messages=USER)):
        ids = preparing.prepare(given).token_ids
        assert ids[0] == BOS
        assert ids.count(BOS) == 1


@pytest.mark.parametrize(("post_processor", "setting", "wanted"), [
    (False, None, 0), (False, True, 1), (True, None, 1), (True, False, 0), (True, True, 1), (False, False, 0)])
def test_case_19_who_decides_on_the_bos(tmp_path: Path, post_processor: bool, setting: bool | None,
                                        wanted: int) -> None:
    """Case 19: add_bos_token decides where it is set, else the tokenizer's post-processor."""
    backend = with_bos(byte_level()) if post_processor else byte_level()
    tokenizer = save(tmp_path, backend, add_bos_token=setting)
    assert tokenizer.encode("the", add_bos=True).count(BOS) == wanted
    assert tokenizer.encode("the", add_bos=False).count(BOS) == 0


def test_case_20_no_hidden_default_bounds_an_answer(tmp_path: Path) -> None:
    """Case 20: without max_tokens an answer is bounded by the context alone, whatever lengths the model names."""
    tokenizer = save(tmp_path, byte_level())
    write_json(tmp_path / "generation_config.json", {"max_length": 20, "max_new_tokens": 16})
    preparing = preparer(tokenizer, model=ModelDefaults.load(tmp_path))
    assert preparing.prepare(row(prompt="the")).params.max_tokens is None
    limited = preparer(tokenizer, defaults=GenerationDefaults(max_tokens=5))
    assert limited.prepare(row(prompt="the")).params.max_tokens == 5
    assert limited.prepare(row(prompt="the", max_tokens=9)).params.max_tokens == 9


def test_case_30_every_file_may_name_ends_of_sequence(tmp_path: Path) -> None:
    """Case 30: a sequence ends at any id that config, nested config, generation config or tokenizer names."""
    tokenizer = save(tmp_path, byte_level())
    assert tokenizer.eos_ids(tmp_path) == {EOS}
    write_json(tmp_path / "config.json", {"eos_token_id": 10, "text_config": {"eos_token_id": [11, 12]}})
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [4, 10]})
    assert tokenizer.eos_ids(tmp_path) == {EOS, 4, 10, 11, 12}
    write_json(tmp_path / "config.json", {"eos_token_id": None})
    assert tokenizer.eos_ids(tmp_path) == {EOS, 4, 10}
    write_json(tmp_path / "config.json", {"eos_token_id": "</s>"})
    with pytest.raises(CheckpointError, match=r"config\.json: eos_token_id.*'</s>'"):
        tokenizer.eos_ids(tmp_path)


def test_case_30_the_end_has_no_text_but_its_id_stays(tmp_path: Path) -> None:
    """Case 30: the id that ended an answer stays in token_ids and gives no text, special or not."""
    tokenizer = save(tmp_path, byte_level())
    the = tokenizer.encode("the", add_bos=False)
    dot = tokenizer.encode(".", add_bos=False)
    for end in (array("i", [EOS]), dot):
        done = with_text(answer(the + end, FinishReason.STOP), tokenizer, frozenset({EOS, dot[0]}))
        assert done.text == "the"
        assert done.token_ids == the + end
    assert with_text(answer(the + dot), tokenizer, frozenset({EOS})).text == "the."


@pytest.mark.parametrize("name", UNSUPPORTED_COLUMNS)
def test_case_b6_a_parameter_without_effect_fails_its_row_by_name(tmp_path: Path, name: str) -> None:
    """Case B6: a value in a known column that has no effect is UNSUPPORTED_PARAMETER and named; a null is no value."""
    preparing = preparer(save(tmp_path, byte_level()))
    error = refusal(preparing, row(prompt="the", **{name: 1}))
    assert error.code is ErrorCode.UNSUPPORTED_PARAMETER
    assert error.message.startswith(name)
    assert preparing.prepare(row(prompt="the", **{name: None})).token_ids


def test_case_b9_tokens_are_counted_from_ids(tmp_path: Path) -> None:
    """Case B9: the count of a prompt is that of the ids which run, BOS and template included, not of its words."""
    tokenizer: Tokenizer = save(tmp_path, with_bos(byte_level()))
    made: Prompt = preparer(tokenizer).prepare(row(prompt="the the\u3000日本"))
    assert len(made.token_ids) == 1 + 2 + 1 + 3 + 6
    assert made.token_ids == tokenizer.encode("the the\u3000日本", add_bos=True)
    assert len(preparer(tokenizer).prepare(row(token_ids=[9, 9, 9])).token_ids) == 3
