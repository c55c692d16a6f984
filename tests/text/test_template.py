"""Chat templates: where they come from, what they may do, and that they render as transformers renders."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from batchgen_beam.errors import CheckpointError, ErrorCode, RowError
from batchgen_beam.text.template import ChatTemplate
from tests.text.tiny import CHATML, CLOCK, template, write_json

TALK = [{"role": "system", "content": "Be brief.\n"}, {"role": "user", "content": " What is <b>π</b>? "},
        {"role": "assistant", "content": "<think>hm</think>3.14"}, {"role": "user", "content": "more"}]

RENDERED = {
    "chatml": CHATML,
    "blocks": """
        {%- if messages[0].role == 'system' %}
            {%- set rest = messages[1:] %}
        {%- else %}
            {%- set rest = messages %}
        {%- endif %}
        {% for m in rest %}
            {% if loop.first %}first {{ loop.length }}{% elif loop.last %}last{% endif %}
            {{ m['content'] | trim }}{{ loop.index0 }}{{ loop.revindex }}
        {% else %}nobody
        {% endfor %}
        {%- if add_generation_prompt %}go{% endif %}""",
    "search": """{% set ns = namespace(found=false, at=0) %}
        {%- for m in messages[::-1] %}{% if not ns.found and m.role == 'user' %}
            {%- set ns.found = true %}{% set ns.at = (messages|length - 1) - loop.index0 %}{% endif %}{% endfor %}
        {{- ns.at }}{% set said = messages[2].content %}
        {%- if '</think>' in said %}{{ said.split('</think>')[-1] }}{% endif %}""",
    "filters": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('|') }}"
               "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ messages | length }}{{ 'a' | upper }}"
               "{{ 'abc' | replace('b', 'xx') }}{{ messages | rejectattr('role', 'in', ['user']) | list | length }}"
               "{{ tools is none }}{{ nothing is defined }}{{ messages | map(attribute='role') | unique | list }}",
    "macros": "{% macro say(m, pad='-') %}{{ pad ~ m.role ~ pad }}{% endmacro %}{% for m in messages %}{{ say(m) }}"
              "{% if loop.index == 2 %}{% continue %}{% endif %}{{ say(m, pad='*') }}"
              "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}"
              "{% set block %}x{{ 1 + 2 * 3 }}{% endset %}{{ block }}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "methods": "{% set t = messages[0].content %}{{ t.strip().split(' ')[0].upper() }}{{ t.rstrip('\\n').title() }}"
               "{{ t.startswith('Be') }}{{ t.endswith(('x', '.')) }}{{ t.find('b') }}{{ t.replace('b', 'c').lower() }}"
               "{{ messages[0].get('name', 'no') }}{{ messages[0].keys() | list }}{{ t.rsplit('e', 1) }}"
               "{{ ', '.join(['a', 'b']) }}{{ t.splitlines() }}{{ t.lstrip('B').partition('b')[2] }}"
               "{{ messages | groupby('role') | map(attribute='grouper') | list }}{{ 4 is even }}"
               "{{ 9 is divisibleby 3 }}{{ 2.345 | round(1) }}{{ 'a' is lower }}{{ ['a', 'b'].index('b') }}",
    "tuples": "{% for key, value in messages[0].items() %}{{ key }}={{ value }};{% endfor %}{{ (1, 2)[0] }}{{ 7 % 4 }}"
              "{{ {'a': [1, 2]}['a'][1] }}{{ 'ab' * 3 }}{{ range(3) | list }}{{ 'x' in ['x'] }}{{ 1 < 2 < 3 }}",
}

BOMBS = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "text times number": "{{ 'x' * 10**10 }}",
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for i in range(50000) %}{% for j in range(50000) if j < 0 %}{% endfor %}{% endfor %}",
    "doubling by ~": "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling by +": "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling lists": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}",
    "doubling dicts": "{% set n = namespace(x=1) %}{% for i in range(99) %}{% set n.x = {1: n.x, 2: n.x} %}"
                      "{% endfor %}",
    "output": "{% set big = 'x' * 1000000 %}{% for i in range(99999) %}{{ big }}{% endfor %}",
    "plain output": "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
    "output of a macro": "{% set big = 'x' * 1000000 %}{% macro m() %}{% for i in range(9999) %}{{ big }}{% endfor %}"
                         "{% endmacro %}{{ m() | length }}",
    "block set": "{% set big = 'x' * 1000000 %}{% set y %}{% for i in range(9999) %}{{ big }}{% endfor %}{% endset %}",
    "replace filter": "{% set big = 'x' * 1000000 %}{{ big | replace('x', big) | length }}",
    "replace method": "{% set big = 'x' * 1000000 %}{{ big.replace('x', big) | length }}",
    "join filter": "{% set big = 'x' * 1000000 %}{{ range(9999) | join(big) | length }}",
    "join method": "{% set big = 'x' * 1000000 %}{{ big.join('y' * 9999) | length }}",
    "kept slices": "{% set n = namespace(l=[], b='x' * 1000000) %}{% for i in range(9999) %}"
                   "{% set n.l = n.l + [n.b[1:]] %}{% endfor %}",
    "searching": "{% set big = 'x' * 1000000 %}{% for i in range(99999) %}{% if 'y' in big %}{% endif %}{% endfor %}",
    "searching by test": "{% set b = 'x' * 1000000 %}{% for i in range(99999) %}{% if 'y' is in b %}{% endif %}"
                         "{% endfor %}",
    "format with %": "{{ '%1000000000d' % 1 }}",
    "format method": "{{ '{:1000000000}'.format(1) }}",
    "format by attr": "{% set f = 'x'['format'] %}{{ f(1) }}",
    "width method": "{{ 'x'.ljust(10**9) }}",
    "indent": "{{ 'x' | indent(10**9) }}",
    "json indent": "{{ messages | tojson(indent=10**9) }}",
    "power": "{{ (9**64)**(9**9) }}",
    "numbers": "{% set n = namespace(x=99) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "slow codec": "{{ ('a' * 1000000).encode('punycode') | length }}",
    "slow codec by attribute": "{% set f = ['a' * 1000000] | map(attribute='encode') | first %}"
                               "{{ f('punycode') | length }}",
    "bytes of a number": "{{ (1).to_bytes(3000000000, 'big') | length }}",
    "bytes of a text": "{{ (('a' * 1000000).encode() * 3000) | length }}",
    "number of bytes": "{{ (0).from_bytes([255] * 100000, 'big') }}",
    "number in base 16": "{% set n = ('f' * 4000000) | int(0, 16) %}{{ n is divisibleby(n - 1) }}",
    "table of characters": "{{ 'x'.maketrans('x', 'y') }}",
    "dict from keys": "{{ {}.fromkeys(range(9), 1) }}",
    "rounding": "{{ 1.5 | round(10**9, 'ceil') }}",
    "rounding down": "{{ 5 | round(-(10**9)) }}",
    "format by odd": "{{ '%1000000000d' is odd }}",
    "format by divisibleby": "{{ '%1000000000d' is divisibleby(1) }}",
    "many to strip": "{{ ('a' * 4000000).strip('b' * 4000000 ~ 'a') | length }}",
    "many to trim": "{{ ('a' * 4000000) | trim('b' * 4000000 ~ 'a') | length }}",
    "searching from the end": "{{ ('a' * 4000000).rfind('ab' ~ 'a' * 2000000) }}",
    "counting in lists": "{% set l = [1] * 90000 %}{% for i in range(99999) %}{{ l.count(2) }}{% endfor %}",
    "searching ranges": "{% for i in range(99999) %}{{ 0.5 in range(99999) }}{% endfor %}",
    "searching values": "{% set d = {'a': 'x' * 1000000} %}{% for i in range(99999) %}{{ 1 in d.values() }}"
                        "{% endfor %}",
    "copied namespaces": "{% set n = namespace(l=[]) %}{% set d = dict(a='x' * 100000) %}"
                         "{% for i in range(99999) %}{% set n.l = namespace(d, b=n.l) %}{% endfor %}",
    "clock": "{{ strftime_now('%9999d' * 100000) }}",
    "macro recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "loop recursion": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
}

ESCAPES = {
    "types": "{{ ().__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__.os }}",
    "clock": "{{ strftime_now.__self__.year }}",
    "dict type": "{{ dict.mro() }}",
    "namespace": "{{ namespace(__init__=1) }}",
    "attr filter": "{{ messages | map(attribute='__class__.__mro__') | list }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import '/etc/passwd' as p %}{{ p }}",
    "extends": "{% extends '/etc/passwd' %}",
    "change": "{{ messages.append(1) }}",
    "change turn": "{{ messages[0].update({'role': 'x'}) }}",
    "meter": "{{ self._TemplateReference__context.vars }}",
}


@pytest.mark.parametrize("source", RENDERED.values(), ids=RENDERED)
def test_renders_as_transformers_does(source: str) -> None:
    """What a usual template writes is what transformers' chat templates write, blank for blank."""
    (reference,), _ = render_jinja_template([TALK], chat_template=source, add_generation_prompt=True,
                                            bos_token="<s>", eos_token="</s>")
    assert template(source).render(TALK) == reference


@pytest.mark.timeout(20)
@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS)
def test_a_bomb_fails_its_row_soon(source: str) -> None:
    """A template that would take unbounded time or memory is stopped as TEMPLATE_ERROR."""
    with pytest.raises(RowError) as caught:
        template(source).render(TALK)
    assert caught.value.code is ErrorCode.TEMPLATE_ERROR


@pytest.mark.parametrize("source", ESCAPES.values(), ids=ESCAPES)
def test_no_way_out(source: str) -> None:
    """A template reaches neither the interpreter, files, nor the messages themselves."""
    talk = [dict(turn) for turn in TALK]
    with pytest.raises(RowError) as caught:
        template(source).render(talk)
    assert caught.value.code is ErrorCode.TEMPLATE_ERROR
    assert talk == TALK


def test_the_budget_grows_with_the_messages() -> None:
    """Long messages are no bomb: a template may handle each of their characters many times."""
    talk = [{"role": "user", "content": "x" * 1_000_000} for _ in range(30)]
    assert len(template(CHATML).render(talk)) > 30_000_000


def test_the_clock_is_frozen_and_part_of_the_identity() -> None:
    """strftime_now prints the clock that was given; only templates that use it have it in their identity."""
    dated, plain = "{{ strftime_now('%d %B %Y') }}", "x"
    later = datetime(2031, 1, 1)

    def at(source: str, clock: datetime) -> ChatTemplate:
        return ChatTemplate(source, specials={}, clock=clock, name="t")

    assert at(dated, CLOCK).render(TALK) == "04 March 2025"
    assert at(dated, CLOCK).identity == at(dated, CLOCK).identity != at(dated, later).identity
    assert at(plain, CLOCK).identity == at(plain, later).identity != at("y", CLOCK).identity


def test_sources_of_a_template(tmp_path: Path) -> None:
    """The file of its own wins over tokenizer_config.json; of a list of named templates `default` is taken."""

    def loaded() -> str | None:
        found = ChatTemplate.load(tmp_path, specials={}, clock=CLOCK)
        return None if found is None else found.render(TALK)

    assert loaded() is None
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": "one"})
    assert loaded() == "one"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "two"}]
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": named})
    assert loaded() == "two"
    write_json(tmp_path / "tokenizer_config.json", {"chat_template": named[:1]})
    with pytest.raises(CheckpointError, match=r"tool_use.*no 'default'"):
        loaded()
    (tmp_path / "chat_template.jinja").write_text("three", encoding="utf-8")
    assert loaded() == "three"


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'x' | center(9) }}", "(" * 99 + "{{" + "(" * 5000, "x" * (1 << 21)])
def test_what_can_not_be_a_template_is_refused_at_start(source: str) -> None:
    """Syntax faults, filters that are not available, and oversized files are the checkpoint's error, not each row's."""
    with pytest.raises(CheckpointError, match="test template"):
        template(source)
