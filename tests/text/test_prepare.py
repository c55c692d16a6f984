"""Rows made ready: one source, strict types, precedence of parameters, lengths, and what a failure shows of its row."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen_beam.errors import CheckpointError, ErrorCode, OptionError, RowError
from batchgen_beam.settings import GenerationDefaults
from batchgen_beam.text.model_files import ModelDefaults
from batchgen_beam.text.prepare import Preparer, prompt_head
from batchgen_beam.text.tokenizer import Tokenizer
from tests.text.tiny import byte_level, preparer, row, save, write_json

USER = {"role": "user", "content": "the end"}
PART = {"type": "text", "text": "the end"}
DEEP = functools.reduce(lambda inner, _: [inner], range(5000), "x")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level tokenizer of 266 ids."""
    return save(tmp_path_factory.mktemp("model"), byte_level())


@pytest.fixture(scope="module")
def preparing(tokenizer: Tokenizer) -> Preparer:
    """With a template and a context of 64 tokens."""
    return preparer(tokenizer)


@pytest.mark.parametrize(("values", "code", "words"), [
    ({}, ErrorCode.INVALID_ROW, "token_ids are all null"),
    ({"prompt": None, "messages": None, "token_ids": None}, ErrorCode.INVALID_ROW, "token_ids are all null"),
    ({"prompt": "x", "messages": [USER]}, ErrorCode.INVALID_ROW, "prompt and messages are given"),
    ({"prompt": "x", "token_ids": [1]}, ErrorCode.INVALID_ROW, "prompt and token_ids"),
    ({"prompt": 7}, ErrorCode.INVALID_ROW, "got int"),
    ({"prompt": b"x"}, ErrorCode.INVALID_ROW, "got bytes"),
    ({"prompt": "x\ud800y"}, ErrorCode.INVALID_TEXT, "prompt holds a lone surrogate U+D800 at character 1"),
    ({"messages": "hello"}, ErrorCode.INVALID_ROW, "no JSON"),
    ({"messages": '{"role": "user", "content": "x"}'}, ErrorCode.INVALID_ROW, "list of turns"),
    ({"messages": "[" * 100_000}, ErrorCode.INVALID_ROW, "no JSON"),
    ({"messages": [USER | {"deep": DEEP}]}, ErrorCode.INVALID_ROW, "nested too deeply"),
    ({"messages": 3}, ErrorCode.INVALID_ROW, "list of turns"),
    ({"messages": []}, ErrorCode.INVALID_ROW, "no turn"),
    ({"messages": ["x"]}, ErrorCode.INVALID_ROW, "messages[0] should be a turn"),
    ({"messages": [USER, None]}, ErrorCode.INVALID_ROW, "messages[1] should be a turn with role and content, got null"),
    ({"messages": [USER, {"role": "user"}]}, ErrorCode.INVALID_ROW, "messages[1].content should be text or a list"),
    ({"messages": [{"role": "user", "content": None}]}, ErrorCode.INVALID_ROW, "list of text parts, got null"),
    ({"messages": [{"role": 1, "content": "x"}]}, ErrorCode.INVALID_ROW, "messages[0].role should be text, got int"),
    ({"messages": [{"role": "", "content": "x"}]}, ErrorCode.INVALID_ROW, "role is empty"),
    ({"messages": [USER | {"content": 7}]}, ErrorCode.INVALID_ROW, "content should be text or a list of text parts"),
    ({"messages": [USER | {"content": []}]}, ErrorCode.INVALID_ROW, "messages[0].content holds no part"),
    ({"messages": [USER | {"content": ["x"]}]}, ErrorCode.INVALID_ROW, "content[0] should be a part with type"),
    ({"messages": [USER | {"content": [PART, {"type": "image_url", "image_url": {"url": "x"}}]}]},
     ErrorCode.INVALID_ROW, "messages[0].content[1] is a part of type 'image_url'"),
    ({"messages": [USER | {"content": [{"text": "x"}]}]}, ErrorCode.INVALID_ROW, "content[0] is a part of type None"),
    ({"messages": [USER | {"content": [{"type": "text"}]}]}, ErrorCode.INVALID_ROW, "content[0].text should be text"),
    ({"messages": [USER | {"content": [PART, PART | {"text": "\ud83d"}]}]}, ErrorCode.INVALID_TEXT, "[0].content"),
    ({"messages": [USER | {"when": object()}]}, ErrorCode.INVALID_ROW, "messages[0].when holds object"),
    ({"messages": r'[{"role": "user", "content": "a\ud83d"}]'}, ErrorCode.INVALID_TEXT, "messages[0].content"),
    ({"messages": [USER | {"tags": ["a", "\udfff"]}]}, ErrorCode.INVALID_TEXT, "messages[0].tags[1]"),
    ({"token_ids": "1 2"}, ErrorCode.INVALID_ROW, "list of integers, got str"),
    ({"token_ids": [1, 2.0]}, ErrorCode.INVALID_ROW, "token_ids[1] should be an integer, got float"),
    ({"token_ids": [True]}, ErrorCode.INVALID_ROW, "got bool"),
    ({"token_ids": [1, None]}, ErrorCode.INVALID_ROW, "token_ids[1] should be an integer, got null"),
    ({"token_ids": [1, 266]}, ErrorCode.INVALID_ROW, "token_ids[1] is 266, outside the vocabulary of 266"),
    ({"token_ids": [-1]}, ErrorCode.INVALID_ROW, "token_ids[0] is -1"),
    ({"prompt": "x", "temperature": -1}, ErrorCode.INVALID_PARAMETER, "temperature must be a number in [0, 2], got -1"),
    ({"prompt": "x", "temperature": math.nan}, ErrorCode.INVALID_PARAMETER, "finite"),
    ({"prompt": "x", "top_p": math.inf}, ErrorCode.INVALID_PARAMETER, "finite"),
    ({"prompt": "x", "top_p": 1.1}, ErrorCode.INVALID_PARAMETER, "top_p"),
    ({"prompt": "x", "temperature": True}, ErrorCode.INVALID_PARAMETER, "the bool"),
    ({"prompt": "x", "max_tokens": "16"}, ErrorCode.INVALID_PARAMETER, "the str '16'"),
    ({"prompt": "x", "max_tokens": 1.5}, ErrorCode.INVALID_PARAMETER, "an integer, got 1.5"),
    ({"prompt": "x", "max_tokens": 0}, ErrorCode.INVALID_PARAMETER, "max_tokens"),
    ({"prompt": "x", "top_k": -2}, ErrorCode.INVALID_PARAMETER, "top_k"),
    ({"prompt": "x", "seed": 10**400}, ErrorCode.INVALID_PARAMETER, "seed"),
    ({"prompt": "x", "temperature": 10**400}, ErrorCode.INVALID_PARAMETER, "temperature"),
    ({"prompt": "x", "logprobs": True}, ErrorCode.INVALID_PARAMETER, "logprobs"),
    ({"prompt": "x", "logprobs": 21}, ErrorCode.INVALID_PARAMETER, "logprobs"),
])
def test_refused(preparing: Preparer, values: Mapping[str, object], code: ErrorCode, words: str) -> None:
    """Each way in which a row can be wrong has its code, and a message that names the place and the value."""
    with pytest.raises(RowError) as caught:
        preparing.prepare(row(**values))
    assert caught.value.code is code
    assert words in caught.value.message


def test_a_problem_found_while_reading_fails_the_row(preparing: Preparer) -> None:
    """What the reader found is reported as it is, before anything else is looked at."""
    with pytest.raises(RowError, match=r"INVALID_ROW: the id is null"):
        preparing.prepare(row("the id is null", prompt=""))


def test_messages_may_be_structs_or_json(preparing: Preparer, tokenizer: Tokenizer) -> None:
    """Structs with null fields, dicts and JSON text of the same turns give the same ids, with no BOS added."""
    forms = ([USER], (USER,), [USER | {"name": None}], json.dumps([USER]))
    made = [preparing.prepare(row(messages=form)).token_ids for form in forms]
    assert all(ids == made[0] for ids in made)
    wanted = "<|im_start|>user\nthe end<|im_end|>\n<|im_start|>assistant\n"
    assert made[0] == tokenizer.encode(wanted, add_bos=False)
    assert made[0][0] == 3


def test_content_may_be_a_list_of_text_parts(preparing: Preparer) -> None:
    """Text parts, as structs with null fields or as JSON, are one text with a newline between them."""
    wanted = preparing.prepare(row(messages=[USER | {"content": "the end\nthe end"}])).token_ids
    parts = [PART, PART | {"image_url": None}]
    for form in ([USER | {"content": parts}], [USER | {"content": tuple(parts)}],
                 json.dumps([USER | {"content": parts}])):
        assert preparing.prepare(row(messages=form)).token_ids == wanted
    one = preparing.prepare(row(messages=[USER | {"content": [PART]}])).token_ids
    assert one == preparing.prepare(row(messages=[USER])).token_ids


def test_messages_without_a_template_fail_their_row(tokenizer: Tokenizer) -> None:
    """A run that starts without template (it has a prompt column, too) fails rows with messages, naming the remedy."""
    with pytest.raises(RowError, match=r"TEMPLATE_ERROR.*--chat-template"):
        preparer(tokenizer, None).prepare(row(messages=[USER]))


def test_precedence(tokenizer: Tokenizer) -> None:
    """Row before run option before the model's generation_config.json before temperature 1 and everything off."""
    plain = preparer(tokenizer).prepare(row(prompt="x")).params
    assert (plain.temperature, plain.top_k, plain.top_p, plain.max_tokens, plain.logprobs) == (1.0, 0, 1.0, None, 0)
    model = ModelDefaults(temperature=0.5, top_k=40, top_p=0.9)
    run = GenerationDefaults(top_k=7, top_p=0.8, seed=3)
    mixed = preparer(tokenizer, model=model, defaults=run).prepare(row(prompt="x", top_p=0.7, seed=None)).params
    assert (mixed.temperature, mixed.top_k, mixed.top_p, mixed.seed) == (0.5, 7, 0.7, 3)


def test_accepted_values(preparing: Preparer) -> None:
    """Whole floats are integers, -1 and 0 turn top_k off, top_p 0 is allowed, a tiny temperature is greedy."""
    values = {"max_tokens": 9.0, "top_k": -1, "top_p": 0, "temperature": 1e-6, "seed": 2**64 - 1}
    made = preparing.prepare(row(prompt="x", **values)).params
    assert (made.max_tokens, made.top_k, made.top_p, made.seed) == (9, 0, 0.0, 2**64 - 1)
    assert type(made.max_tokens) is int
    assert made.greedy
    assert not preparing.prepare(row(prompt="x", temperature=1e-4, top_k=0.0)).params.greedy


def test_a_wrong_run_option_is_found_at_start(tokenizer: Tokenizer) -> None:
    """A run option out of its range stops the run before any row."""
    with pytest.raises(OptionError, match=r"run option: temperature.*got 3"):
        preparer(tokenizer, defaults=GenerationDefaults(temperature=3))


def test_model_defaults(tmp_path: Path) -> None:
    """generation_config.json: do_sample false is greedy; what is not applied is named; faults are the checkpoint's."""
    path = tmp_path / "generation_config.json"
    assert ModelDefaults.load(tmp_path) == ModelDefaults()
    write_json(path, {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "repetition_penalty": 1.05,
                      "min_p": 0.0})
    assert ModelDefaults.load(tmp_path) == ModelDefaults(temperature=0.6, top_k=20, top_p=0.95,
                                                         unapplied=("repetition_penalty=1.05",))
    write_json(path, {"temperature": 0.6, "do_sample": False})
    assert ModelDefaults.load(tmp_path).temperature == 0.0
    for wrong, words in (({"temperature": "0.6"}, "temperature must be a finite"), ({"top_p": 2}, "top_p must be"),
                         ({"top_k": 1.5}, "top_k must be an integer"), ([1], "JSON object")):
        write_json(path, wrong)
        with pytest.raises(CheckpointError, match=words):
            ModelDefaults.load(tmp_path)


def test_a_huge_prompt_is_refused_from_its_beginning(tokenizer: Tokenizer) -> None:
    """Of a text far beyond the context only the beginning is tokenized, and the message says so."""
    with pytest.raises(RowError, match=r"PROMPT_TOO_LONG.*first 4096 characters.*4096 tokens.*holds 512"):
        preparer(tokenizer, context=512).prepare(row(prompt="x" * 100_000_000))


def test_a_text_of_few_tokens_for_its_length_is_not_refused(tokenizer: Tokenizer) -> None:
    """A look at the beginning decides only where it leaves no doubt."""
    text = " the" * 15
    assert len(text) > 3 * 16
    made = preparer(tokenizer, context=16).prepare(row(prompt=text))
    assert len(made.token_ids) == 15


@given(st.lists(st.sampled_from([" the", "11", "x", "\n", "é", "<s>"]), max_size=200).map("".join))
def test_the_early_look_agrees_with_a_full_count(tokenizer: Tokenizer, text: str) -> None:
    """A prompt is too long exactly if its full count says so, whichever way it was found."""
    count = len(tokenizer.encode(text, add_bos=True))
    preparing = preparer(tokenizer, context=8)
    if count < 8:
        assert len(preparing.prepare(row(prompt=text or "x")).token_ids) == max(1, count)
    else:
        with pytest.raises(RowError, match="PROMPT_TOO_LONG"):
            preparing.prepare(row(prompt=text))


@pytest.mark.parametrize(("values", "head"), [
    ({"prompt": "😀" * 500}, "😀" * 120),
    ({"prompt": "a\ud800b"}, "a?b"),
    ({"messages": [USER, {"role": "user", "content": "last"}]}, "last"),
    ({"messages": r'[{"content": "\ud800"}]'}, r'[{"content": "\ud800"}]'),
    ({"messages": 5}, "5"),
    ({"messages": [None]}, "[None]"),
    ({"token_ids": list(range(1000))}, "[0, 1, 2, 3, 4, 5, ...]"),
    ({"prompt": b"raw"}, "b'raw'"),
    ({}, ""),
])
def test_prompt_head(values: Mapping[str, object], head: str) -> None:
    """A failure shows at most 120 characters of its row, which any UTF-8 writer takes."""
    shown = prompt_head(row(**values))
    assert shown == head
    assert len(shown.encode("utf-8").decode()) <= 120
