"""Templates that would take hours or all memory end in a typed error at once."""

import pytest

from paceline.core.errors import InvalidRequest, UnsupportedModel
from paceline.model_files.tokenizer.chat_template import ChatTemplate
from paceline.model_files.tokenizer.template_limits import LimitedEnvironment, TemplateLimit

LARGE = "{% set s = 'a' * 1000000 %}"
GROWING = "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set n.x = n.x OP n.x %}{% endfor %}"
BOMBS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a condition without iterations": "{% for a in range(99999) %}{% for b in range(99999) if 0 %}{% endfor %}{% endfor %}",
    "two calls in each call": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "endless recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "repetition": "{{ 'a' * 10**10 }}",
    "a repeated list": "{{ ([0] * 10**9) | length }}",
    "powers": "{{ 10 ** 10 ** 10 }}",
    "concatenation": GROWING.replace("OP", "~"),
    "addition": GROWING.replace("OP", "+"),
    "a wide field": "{{ '%1000000000d' % 1 }}",
    "a width as a value": "{{ '%*d' % (1000000, 1) }}",
    "a wide format": "{{ '{:>1000000000}'.format(1) }}",
    "many fields": LARGE + "{{ ('{0}' * 1000000).format(s) }}",
    "many named fields": LARGE + "{{ ('%(a)s' * 1000000) % {'a': s} }}",
    "padding": "{{ 'a'.ljust(10**9) }}",
    "the filter center": "{{ 'a' | center(10**9) }}",
    "the filter tojson": "{{ [1] | tojson(indent=10**9) }}",
    "the filter sum": "{{ ([[0] * 100000] * 1000) | sum(start=[]) | length }}",
    "replacement": LARGE + "{{ s.replace('a', s) | length }}",
    "the filter replace": LARGE + "{{ s | replace('a', s) | length }}",
    "joining": LARGE + "{{ s.join(s) | length }}",
    "the filter join": LARGE + "{{ s | list | join(s) | length }}",
    "much literal text": "{% set x %}{% for a in range(99999) %}" + "x" * 200_000 + "{% endfor %}{% endset %}{{ x }}",
    "indentation": "{{ ('a\n' * 200000) | indent(20000) | length }}",
    "indentation of the first line": "{{ 'a' | indent(width='x' * 20000000, first=true) | length }}",
    "indented JSON": "{{ range(90000) | list | tojson(indent=20000) | length }}",
    "tabs": "{{ ('\t' * 200000).expandtabs(20000) | length }}",
    "division by zero": "{{ 1 / 0 }}",
}


@pytest.mark.parametrize("source", BOMBS.values(), ids=BOMBS)
def test_a_template_bomb_is_an_invalid_request(source: str) -> None:
    with pytest.raises(InvalidRequest, match="the chat template rejects"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if 1 %}" * 3000 + "{% endif %}" * 3000, "x" * 300_000]
)
def test_a_template_that_no_compiler_takes_is_unsupported(source: str) -> None:
    with pytest.raises(UnsupportedModel, match="does not parse"):
        ChatTemplate(source, {})


def test_a_slow_template_ends_at_its_deadline() -> None:
    times = iter(range(1000))
    environment = LimitedEnvironment(repr, clock=lambda: float(next(times)))
    template = environment.compile_limited("{% for i in range(99) %}{{ i }}{% endfor %}")
    with pytest.raises(TemplateLimit, match="seconds"):
        environment.render(template, {})


def test_a_long_chat_fits_the_limits() -> None:
    source = "{% for m in messages %}<{{ m['role'] ~ '|' + m.content | trim }}>{{ loop.last }}{% endfor %}"
    messages = [{"role": "user", "content": "word " * 400} for _ in range(4000)]  # 8 MB
    text = ChatTemplate(source, {}).render(messages)
    assert len(text) > 7_900_000
    assert text.endswith("word>True")
