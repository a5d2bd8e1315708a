"""Calls of tools in the published format of each family, cut at every character."""

import json
from typing import Any

import pytest

from paceline.gateway.formats.calls import ForcedCallParser, ForcedChoiceParser
from paceline.gateway.formats.choose import FORMATS
from paceline.gateway.formats.pieces import CallDelta
from tests.gateway.formats.parsing import TOOLS, cuts, parse

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "<tool_call>"}}\n</tool_call>'
ADDED = ("add", {"a": 1, "b": "<tool_call>"})
ROME = {"city": "Rome", "days": 3}
WEATHER = ("get_current_weather", ROME)
PARIS = ("get_current_weather", {"city": "Paris", "days": 1})


def wide(name: str) -> str:
    return f"<\uff5c{name}\uff5c>"


BEGIN, SEPARATOR, END = wide("tool▁call▁begin"), wide("tool▁sep"), wide("tool▁call▁end")
ALL_BEGIN, ALL_END = wide("tool▁calls▁begin"), wide("tool▁calls▁end")
JSON = json.dumps(ROME)

CASES: dict[str, tuple[str, str, str, list[Any]]] = {
    "plain text": ("hermes", "Just words < and {braces}.\n", "Just words < and {braces}.\n", []),
    "hermes": ("hermes", HERMES, "", [ADDED]),
    "hermes, text before": ("hermes", "Let me see.\n" + HERMES, "Let me see.", [ADDED]),
    "hermes, two": (
        "hermes",
        HERMES + '\n<tool_call>{"name": "look", "arguments": {}}</tool_call>\n',
        "",
        [ADDED, ("look", {})],
    ),
    "hermes, text after": (
        "hermes",
        '<tool_call>{"name": "look", "arguments": {}}</tool_call> Done.',
        " Done.",
        [("look", {})],
    ),
    "hermes, not closed": ("hermes", '<tool_call>{"name": "look", "arguments": {"x": 2}}', "", [("look", {"x": 2})]),
    "hermes, arguments as a string": (
        "hermes",
        '<tool_call>{"name": "look", "arguments": "{\\"x\\": 2}"}</tool_call>',
        "",
        [("look", {"x": 2})],
    ),
    "hermes, arguments first": (
        "hermes",
        '<tool_call>{"arguments": {"x": "}"}, "name": "look"}</tool_call>',
        "",
        [("look", {"x": "}"})],
    ),
    "hermes, keys after": (
        "hermes",
        '<tool_call>{"name": "look", "arguments": {"x": {"y": []}}, "id": {"a": 1}}</tool_call>',
        "",
        [("look", {"x": {"y": []}})],
    ),
    "hermes, two braces": (
        "hermes",
        '<tool_call>\n{{"name": "look", "arguments": {"x": {}}}}\n</tool_call>\nDone.',
        "\nDone.",
        [("look", {"x": {}})],
    ),
    "two braces, no call": ("hermes", '{{"name": "x"}}', '{{"name": "x"}}', []),
    "hermes, broken": ("hermes", "So:\n\n<tool_call>{</tool_call>", "So:\n\n<tool_call>{</tool_call>", []),
    "hermes, no arguments": (
        "hermes",
        '<tool_call>{"name": "look", </tool_call>',
        '<tool_call>{"name": "look", </tool_call>',
        [],
    ),
    "hermes, cut": ("hermes", '<tool_call>{"name": "lo', '<tool_call>{"name": "lo', []),
    "hermes, cut tag": ("hermes", "see <tool_", "see <tool_", []),
    "hermes, no such tool": (
        "hermes",
        'No: <tool_call>{"name": "drop", "arguments": {}}</tool_call> ' + HERMES,
        'No: <tool_call>{"name": "drop", "arguments": {}}</tool_call>',
        [ADDED],
    ),
    "fence": (
        "hermes",
        'I will look.\n```json\n{\n  "name": "look",\n  "arguments": {\n    "x": "```"\n  }\n}\n```',
        "I will look.",
        [("look", {"x": "```"})],
    ),
    "fence, a bracket too many": (
        "hermes",
        '```json\n{"name": "look", "arguments": {}}}\n```\nDone.',
        "\nDone.",
        [("look", {})],
    ),
    "fence of something else": (
        "hermes",
        'Like this:\n```json\n{"city": "Rome"}\n```\nOr ```jsonc\n{}\n```',
        'Like this:\n```json\n{"city": "Rome"}\n```\nOr ```jsonc\n{}\n```',
        [],
    ),
    "fence of a name": (
        "hermes",
        '```json\n{"name": "Bob", "arguments": {}}\n```',
        '```json\n{"name": "Bob", "arguments": {}}\n```',
        [],
    ),
    "llama": ("llama", '{"name": "look", "parameters": {"x": [1]}}', "", [("look", {"x": [1]})]),
    "llama, tagged": ("llama", '<|python_tag|>{"name": "look", "parameters": {}}', "", [("look", {})]),
    "llama, several": (
        "llama",
        '{"name": "look", "parameters": {}}; {"type": "function", "name": "add", "parameters": {"a": 1}}',
        "",
        [("look", {}), ("add", {"a": 1})],
    ),
    "llama, JSON": ("llama", '{"answer": {"name": "look"}}', '{"answer": {"name": "look"}}', []),
    "llama, like a call": ("llama", '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    "llama, python": ("llama", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    "pythonic": (
        "llama",
        "[get_current_weather(city='Rome', days=3), add(a=-1, b=\"x)]\", c=[True, {'k': None}])]",
        "",
        [WEATHER, ("add", {"a": -1, "b": "x)]", "c": [True, {"k": None}]})],
    ),
    "pythonic, no arguments": ("llama", "[look()]", "", [("look", {})]),
    "pythonic, a list": ("llama", "[1, 2, 3] are numbers", "[1, 2, 3] are numbers", []),
    "pythonic, another call": ("llama", "[print(1)]", "[print(1)]", []),
    "qwen xml": (
        "qwen_xml",
        "Sure.\n<tool_call>\n<function=get_current_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        "Sure.",
        [WEATHER],
    ),
    "qwen xml, two, odd values": (
        "qwen_xml",
        '<tool_call>\n<function=add>\n<parameter=b>\n\n two\n"lines" < </para\n\n</parameter>\n'
        '<parameter=c>\n[1, "x"]\n</parameter>\n'
        "</function>\n</tool_call>\n<tool_call>\n<function=look>\n</function>\n</tool_call>",
        "",
        [("add", {"b": '\n two\n"lines" < </para\n', "c": [1, "x"]}), ("look", {})],
    ),
    "qwen xml, not JSON": (
        "qwen_xml",
        "<tool_call>\n<function=add>\n<parameter=a>\nmany\n</parameter>\n<parameter=new>\nTrue\n</parameter>\n</function>",
        "",
        [("add", {"a": "many", "new": True})],
    ),
    "qwen xml, text like a number": (
        "qwen_xml",
        "<tool_call><function=add><parameter=b>1</parameter></function></tool_call>",
        "",
        [("add", {"b": "1"})],
    ),
    "qwen xml, other tool": (
        "qwen_xml",
        "<tool_call>\n<function=drop>\n</function>\n</tool_call>",
        "<tool_call>\n<function=drop>\n</function>\n</tool_call>",
        [],
    ),
    "qwen xml, as Hermes": ("qwen_xml", HERMES, "", [ADDED]),
    "glm": (
        "glm",
        "\n<tool_call>get_current_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>look\n</tool_call>",
        "",
        [WEATHER, ("look", {})],
    ),
    "glm 4.7": (
        "glm",
        "<tool_call>get_current_weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days</arg_key><arg_value>3"
        "</arg_value></tool_call>",
        "",
        [WEATHER],
    ),
    "minimax": (
        "minimax",
        '<minimax:tool_call>\n<invoke name="get_current_weather">\n<parameter name="city">Rome</parameter>\n'
        '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="look">\n</invoke>\n</minimax:tool_call>',
        "",
        [WEATHER, ("look", {})],
    ),
    "deepseek v3": (
        "deepseek",
        f"Looking.{ALL_BEGIN}{BEGIN}function{SEPARATOR}get_current_weather\n```json\n{JSON}\n```{END}\n"
        f"{BEGIN}function{SEPARATOR}look\n```json\n{{}}\n```{END}{ALL_END}",
        "Looking.",
        [WEATHER, ("look", {})],
    ),
    "deepseek v3.1": (
        "deepseek",
        f"{ALL_BEGIN}{BEGIN}get_current_weather{SEPARATOR}{JSON}{END}{BEGIN}look{SEPARATOR}{{}}{END}{ALL_END}",
        "",
        [WEATHER, ("look", {})],
    ),
    "mistral v11": (
        "mistral",
        f"[TOOL_CALLS]get_current_weather[ARGS]{JSON}[TOOL_CALLS]look[ARGS]{{}}",
        "",
        [WEATHER, ("look", {})],
    ),
    "mistral v11 with an id": (
        "mistral",
        f"[TOOL_CALLS]get_current_weather[CALL_ID]abcDEF123[ARGS]{JSON}",
        "",
        [WEATHER],
    ),
    "mistral v3": (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_current_weather", "arguments": ' + JSON + '}, {"name": "look", "arguments": {}}]',
        "",
        [WEATHER, ("look", {})],
    ),
    "granite": (
        "granite",
        '<|tool_call|>[{"name": "get_current_weather", "arguments": ' + JSON + "}]",
        "",
        [WEATHER],
    ),
    "phi4": (
        "phi4",
        'functools[{"name": "get_current_weather", "arguments": ' + JSON + '}, {"name": "look", "arguments": {}}]',
        "",
        [WEATHER, ("look", {})],
    ),
    "phi4, tagged": (
        "phi4",
        '<|tool_call|>[{"name": "look", "arguments": {}}]<|/tool_call|>',
        "",
        [("look", {})],
    ),
    "phi4, the module": (
        "phi4",
        "Use functools.reduce, or functools[0].",
        "Use functools.reduce, or functools[0].",
        [],
    ),
    "olmo": (
        "olmo",
        '<function_calls>\nget_current_weather(city="Rome", days=3)\nadd(c=[true, null])\n</function_calls>',
        "",
        [WEATHER, ("add", {"c": [True, None]})],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_cut_gives_the_same_result(name: str) -> None:
    format_, text, expected, calls = CASES[name]
    for parts in cuts(text):
        assert parse(FORMATS[format_].parser(TOOLS, None), *parts) == (expected, "", calls), parts


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case[3]) > 1])
def test_a_limit_drops_further_calls(name: str) -> None:
    format_, text, _, calls = CASES[name]
    assert parse(FORMATS[format_].parser(TOOLS, 1), *text)[2] == calls[:1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hermes", "<tool_"),
        ("qwen xml, two, odd values", "lines"),
        ("deepseek v3.1", "Rom"),
        ("glm", "Rom"),
        ("granite", "Rom"),
    ],
)
def test_arguments_are_passed_on_before_the_call_is_complete(name: str, value: str) -> None:
    format_, text, _, _ = CASES[name]
    parser = FORMATS[format_].parser(TOOLS, None)
    at = text.rindex(value) + len(value)
    deltas = [piece for piece in parser.push(text[:at]) if isinstance(piece, CallDelta)]
    assert deltas[0].id is not None
    assert value[:2] in "".join(delta.arguments for delta in deltas)


def test_text_is_returned_as_early_as_possible() -> None:
    parser = FORMATS["hermes"].parser(TOOLS, None)
    assert parser.push("Hello") == ["Hello"]
    assert parser.push(" <tool") == []
    assert parser.push("box>") == [" <toolbox>"]
    assert FORMATS["hermes"].parser(TOOLS, None).push('{"answer": 1') == ['{"answer": 1']


def test_ids_are_those_that_the_template_expects() -> None:
    for format_, text, length in (("hermes", CASES["hermes"][1], 29), ("mistral", CASES["mistral v11"][1], 9)):
        pieces = FORMATS[format_].parser(TOOLS, None).push(text)
        ids = [piece.id for piece in pieces if isinstance(piece, CallDelta) and piece.id is not None]
        assert all(len(call) == length for call in ids)
        assert len(set(ids)) == len(ids)


def test_a_forced_call_streams_its_arguments() -> None:
    parser = ForcedCallParser("add")
    first, second = *parser.push('{"a"'), *parser.push(": 1}")
    assert isinstance(first, CallDelta)
    assert isinstance(second, CallDelta)
    assert (first.name, first.arguments, second.id, second.arguments) == ("add", '{"a"', None, ": 1}")
    assert parser.push("") == parser.flush() == []


def test_a_forced_choice_streams_its_arguments() -> None:
    text = '{"name": "add", "arguments": {"a": 1}}'
    for parts in cuts(text):
        assert parse(ForcedChoiceParser(TOOLS), *parts) == ("", "", [("add", {"a": 1})])
    assert parse(ForcedChoiceParser(TOOLS), '{"name": "add", "argu') == ('{"name": "add", "argu', "", [])
