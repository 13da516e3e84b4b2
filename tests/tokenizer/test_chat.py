"""Chat templates: what they are given, what they may use, and what hostile ones are refused."""

# ruff: noqa: E501 (templates in one line)

import json
import re
import time

import pytest

from infer.errors import ConfigError, RequestError
from infer.tokenizer import Tokenizer, metering
from infer.tokenizer.chat import ChatTemplate
from tests.tokenizer.vocabularies import byte_level

TEMPLATE = """
{%- if tools %}{{ tools | tojson }}{% endif -%}
{% for message in messages %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
{{ bos_token if loop.first }}{{ message['role'] ~ ': ' + message.content | trim }}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}
"""
USER = {"role": "user", "content": " hi "}


def tokenizer(template: str | None, **more) -> Tokenizer:
    metadata = byte_level(["h i"], **more)
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    return Tokenizer.from_gguf(metadata)


def render(source: str, messages=(USER,), **variables) -> str:
    return ChatTemplate(source).render(list(messages), add_generation_prompt=True, **variables)


def test_a_conversation():
    messages = [USER, {"role": "tool", "content": "x"}, {"role": "assistant", "content": "ja"}]
    text = tokenizer(TEMPLATE).apply_chat_template(messages, tokenize=False)
    assert text == "<s>user: hi</s>\nassistant: ja</s>\nassistant:"
    closed = tokenizer(TEMPLATE).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=False
    )
    assert closed == "<s>user: hi</s>\nassistant: ja</s>\n"


def test_ids_are_those_of_the_text_with_special_tokens():
    chat = tokenizer(TEMPLATE)
    ids = chat.apply_chat_template([USER])
    assert ids[0] == 0 and ids.count(1) == 1
    assert chat.decode(ids, skip_special_tokens=False) == "<s>user: hi</s>\nassistant:"


@pytest.mark.parametrize("add_bos_token", [True, False])
@pytest.mark.parametrize("written", [True, False])
def test_bos_once(add_bos_token, written):
    template = ("{{ bos_token }}" if written else "") + "{{ messages[0].content }}"
    chat = tokenizer(template, add_bos_token=add_bos_token)
    expected = [0] if written or add_bos_token else []
    assert chat.apply_chat_template([{"role": "user", "content": "hi"}]) == [*expected, 258]


def test_no_template_says_the_way_out():
    with pytest.raises(ConfigError, match=r"pass chat_template=\.\.\. or use completion"):
        tokenizer(None).apply_chat_template([USER])
    given = Tokenizer.from_gguf(byte_level([]), chat_template="{{ messages | length }}")
    assert given.apply_chat_template([USER], tokenize=False) == "1"
    assert given.chat_template == "{{ messages | length }}"


def test_variables_and_tools():
    source = (
        "{{ enable_thinking }} {{ tools[0].name }} {{ documents is none }} {{ unset is defined }}"
    )
    tools = [{"name": "sum"}]
    text = tokenizer(source).apply_chat_template(
        [USER], tokenize=False, tools=tools, enable_thinking=False
    )
    assert text == "False sum True False"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ {'ä': '<&>', 'b': [1, none]} | tojson }}", '{"ä": "<&>", "b": [1, null]}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}{{ v }}{{ loop.last }}{% endfor %}", "a1Falseb2True"),
        ("{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "1"),
        ("{% for x in [1, 2, 3] if x > 1 %}{{ loop.length }}{% else %}-{% endfor %}", "22"),
        ("{% for x in nothing %}{% else %}none{% endfor %}", "none"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ messages | map(attribute='role') | map('upper') | join(', ') }}", "USER"),
        ("{{ ' <a>b</a> '.split('</a>')[0].lstrip() }}", "<a>b"),
        ("{{ 'a-b'.split('-', 1) | last }}{{ 'x y'.split() | length }}", "b2"),
        ("{{ 'abc'[::-1] }}{{ messages[1:] }}{{ messages[-1].role }}", "cba[]user"),
        ("{{ 7 % 3 }} {{ 2 ** 10 }} {{ 'ab' * 2 }} {{ [1] + [2] }} {{ 'x' ~ 1 ~ none }}", "1 1024 abab [1, 2] x1None"),
        ("{{ 'a\nb' | indent(2) }}|{{ 'a' | replace('a', 'b') }}|{{ 'a,b'.replace(',', ';') }}", "a\n  b|b|a;b"),
        ("{%- macro f(x, y=2) -%}[{{ x }}{{ y }}]{%- endmacro -%}{{ f(1) }}{{ f(3, y=4) }}", "[12][34]"),
        ("{{ {'b': 1, 'a': 2} | dictsort }}{{ {'a': 1} | items | list }}", "[('a', 2), ('b', 1)][('a', 1)]"),
        ("{{ messages[0].missing }}{{ missing | default('d') }}{{ '' | default('e', true) }}", "de"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ ['b', 'a'] | sort | first }}{{ [3, 1] | max }}{{ 'ab' | list | length }}{{ 'x' | string | safe }}", "a32x"),
        ("{{ 'content' in messages[0] and messages[0].content is string and messages is iterable }}", "True"),
        ("{% for m in messages recursive %}{{ loop.depth }}{{ loop([]) }}{% endfor %}", "1"),
        ("{% set x %}block{% endset %}{{ x.title() }}", "Block"),
    ],
)  # fmt: skip
def test_what_templates_use(source, text):
    assert render(source) == text


def test_a_template_that_raises():
    with pytest.raises(RequestError, match=r"^the chat template refused: no tools here$"):
        render("{{ raise_exception('no\n tools here') }}")
    with pytest.raises(RequestError, match=r"^the chat template failed: ZeroDivisionError"):
        render("{{ 1 / 0 }}")
    with pytest.raises(RequestError, match="has no attribute 'name'"):
        render("{{ messages[0].name.first }}")
    with pytest.raises(RequestError, match=r"^the chat template failed: TypeError"):
        render("{% include 'other' %}")


def test_a_template_that_does_not_compile():
    for source in ("{% for %}", "{{ 1 | nofilter }}", "{% endif %}", "{{ x", "{{ 'a' | center }}"):
        with pytest.raises(ConfigError, match=r"^the chat template does not compile: line 1: "):
            ChatTemplate(source)
    with pytest.raises(ConfigError, match="does not compile"):
        ChatTemplate("{{ " + "(" * 5000 + ")" * 5000 + " }}")
    with pytest.raises(ConfigError, match="300,000 characters; 262,144 are allowed"):
        ChatTemplate("x" * 300_000)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"content": "x"}], r"messages\[0\] has no role"),
        ([USER, {"role": 3}], r"messages\[1\] has no role"),
    ],
)
def test_messages_that_are_none(messages, message):
    with pytest.raises(RequestError, match=message):
        render("x", messages)


def test_content_is_data():
    content = "{{ 1 + 1 }}{% endfor %}"
    assert render("{{ messages[0].content }}", [{"role": "user", "content": content}]) == content


def test_rendering_changes_no_message():
    messages = [{"role": "user", "content": "x", "list": [1]}]
    before = json.dumps(messages)
    for source in (
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ messages[0].list.extend([2]) }}",
        "{{ messages[0].pop('role') }}",
    ):
        with pytest.raises(RequestError, match="the chat template was stopped: it reads"):
            render(source, messages)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'].__mro__ }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__['os'].system('id') }}",
        "{{ joiner.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ self._TemplateReference__context }}",
        "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ messages | sort(attribute='__class__') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ '{:1000000000}'['format'](1) }}",
        "{{ ['{:9}'] | map(attribute='format_map') | list }}",
        "{{ (1).to_bytes(10 ** 10) }}",
        "{{ 'a'.encode() }}",
        "{{ dict.fromkeys([1]) }}",
        "{{ 'a'.ljust(10 ** 9) }}",
        "{{ 'a'.expandtabs(10 ** 9) }}",
    ],
)
def test_the_ways_out_of_the_sandbox_are_closed(source):
    with pytest.raises(RequestError, match=r"^the chat template was stopped: it reads '"):
        render(source)


GROW = "{% set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = NEXT %}{% endfor %}"


def grow(start: str, step: str, then: str = "") -> str:
    return GROW.replace("START", start).replace("NEXT", step) + then


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(9999) recursive %}{{ loop(range(9999)) }}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}{% else %}a{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ 10 ** 9 * 'a' }}",
        "{{ [1] * 10 ** 9 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ strftime_now('%1000000000Y') }}",
        "{{ messages | tojson(indent=10 ** 9) }}",
        "{{ 'a' | indent(10 ** 9) }}",
        "{{ ('a\n' * 100000) | indent(64) | indent(64) | indent(64) | indent(64) }}",
        "{{ ('a' * 1000000).replace('', 'b' * 1000000) }}",
        "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
        "{{ (['a' * 1000000] * 1000) | join }}",
        "{{ (['a' * 1000000] * 1000) | string }}",
        "{{ (['a' * 1000000] * 1000) | tojson }}",
        "{{ ['a' * 1000000] * 1000 }}",
        "{{ ('b' * 1000000).join(['a'] * 1000) }}",
        "{{ ('b' * 1000000).join(messages * 1000) }}",
        "{{ (['a'] * 1000) | join('b' * 1000000) }}",
        "{{ {'k': ['a' * 1000000] * 1000}.values() }}",
        "{{ ('a' * 10000000) | list | length }}",
        "{{ ('a ' * 5000000).split() | length }}",
        "{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
        "{% set x %}{% for i in range(99999) %}{{ 'x' * 10000 }}{% endfor %}{% endset %}",
        grow("'aaaaaaaa'", "ns.x ~ ns.x"),
        grow("'aaaaaaaa'", "ns.x + ns.x"),
        grow("'aaaaaaaa'", "ns.x | replace('a', 'aa')"),
        grow("2", "ns.x * ns.x"),
        grow("[1]", "ns.x + ns.x"),
        grow("[1]", "[ns.x, ns.x]"),
        grow("(1,)", "(ns.x, ns.x)", "{{ {ns.x: 1} }}"),
        grow("(1,)", "{'a': ns.x, 'b': ns.x}"),
        grow("1", "dict(a=ns.x, b=ns.x)"),
        grow("1", "namespace(a=ns.x, b=ns.x)", "{{ ns }}"),
        "{% set ns = namespace(l=[]) %}{% set b = [1] * 100000 %}{% for i in range(99999) %}"
        "{% set ns.l = ns.l + [b[:]] %}{% endfor %}",
        "{% set ns = namespace(l=[]) %}{% set b = 'a' * 100000 %}{% for i in range(99999) %}"
        "{% set ns.l = ns.l + [b[1:]] %}{% endfor %}",
        "{{ lipsum(10 ** 6) }}",
    ],
)  # fmt: skip
def test_what_would_take_for_ever_or_all_memory_is_stopped(source, monkeypatch):
    # The real limits stop these too, in seconds; type checks make each step slower here.
    monkeypatch.setattr(metering, "MAX_STEPS", 30_000)
    monkeypatch.setattr(metering, "MAX_CHARS", 1 << 25)
    start = time.monotonic()
    with pytest.raises((RequestError, ConfigError)) as caught:
        render(source)
    assert time.monotonic() - start < 3
    assert re.match("the chat template (was stopped|failed|refused): .{9,}", str(caught.value))


def test_the_deadline(monkeypatch):
    monkeypatch.setattr(metering, "MAX_SECONDS", 0.0)
    with pytest.raises(RequestError, match="it runs for more than 0 s"):
        render("{{ 'x' }}")


def test_a_long_conversation_fits():
    messages = [{"role": "user", "content": "word " * 2000}] * 1000
    text = render("{% for m in messages %}{{ m.role ~ ': ' + m.content }}\n{% endfor %}", messages)
    assert len(text) == 1000 * (6 + 10_000 + 1)
