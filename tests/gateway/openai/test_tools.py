"""Parsers of tool calls in generated text."""

import json

import pytest

from paceline.gateway.openai.tools import (
    AutoCallParser,
    CallDelta,
    ForcedCallParser,
    ForcedChoiceParser,
    ToolCallParser,
)

TOOLS = {"add", "look"}


def parse(parser: ToolCallParser, text: str, size: int) -> tuple[str, list[tuple[str, dict]]]:
    """Text and calls, from `size` characters at a time."""
    pieces = [piece for i in range(0, len(text), size) for piece in parser.push(text[i : i + size])] + parser.flush()
    calls: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, CallDelta):
            if piece.id is not None:
                assert piece.id.startswith("call_")
                assert piece.index == len(calls)
                calls.append([piece.name or "", ""])
            calls[piece.index][1] += piece.arguments
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "<tool_call>"}}\n</tool_call>'
CASES = {
    "plain text": ("Just words < and {braces}.\n", "Just words < and {braces}.\n", []),
    "one call": (HERMES, "", [("add", {"a": 1, "b": "<tool_call>"})]),
    "text before": ("Let me see.\n" + HERMES, "Let me see.", [("add", {"a": 1, "b": "<tool_call>"})]),
    "two calls": (
        HERMES + '\n<tool_call>{"name": "look", "arguments": {}}</tool_call>\n',
        "",
        [("add", {"a": 1, "b": "<tool_call>"}), ("look", {})],
    ),
    "text after": ('<tool_call>{"name": "look", "arguments": {}}</tool_call> Done.', " Done.", [("look", {})]),
    "not closed": ('<tool_call>{"name": "look", "arguments": {"x": 2}}', "", [("look", {"x": 2})]),
    "arguments as a string": (
        '<tool_call>{"name": "look", "arguments": "{\\"x\\": 2}"}</tool_call>',
        "",
        [("look", {"x": 2})],
    ),
    "broken JSON after text": ("So:\n\n<tool_call>{</tool_call>", "So:\n\n<tool_call>{</tool_call>", []),
    "broken JSON": ('<tool_call>{"name": "look", </tool_call>', '<tool_call>{"name": "look", </tool_call>', []),
    "truncated": ('<tool_call>{"name": "lo', '<tool_call>{"name": "lo', []),
    "a truncated tag": ("see <tool_", "see <tool_", []),
    "no such tool": (
        '<tool_call>{"name": "drop", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "drop", "arguments": {}}</tool_call>',
        [],
    ),
    "llama": ('{"name": "look", "parameters": {"x": [1]}}', "", [("look", {"x": [1]})]),
    "llama, tagged": ('<|python_tag|>{"name": "look", "parameters": {}}', "", [("look", {})]),
    "llama, several": (
        '{"name": "look", "parameters": {}}; {"type": "function", "name": "add", "parameters": {"a": 1}}',
        "",
        [("look", {}), ("add", {"a": 1})],
    ),
    "JSON without a call": ('{"answer": {"name": "look"}}', '{"answer": {"name": "look"}}', []),
    "JSON like a call": ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    "python": ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
}


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("name", CASES)
def test_any_split_gives_the_same_result(name: str, size: int) -> None:
    text, expected_text, expected_calls = CASES[name]
    assert parse(AutoCallParser(TOOLS), text, size) == (expected_text, expected_calls)


def test_text_is_returned_as_early_as_possible() -> None:
    parser = AutoCallParser(TOOLS)
    assert parser.push("Hello") == ["Hello"]
    assert parser.push(" <tool") == []
    assert parser.push("box>") == [" <toolbox>"]
    assert AutoCallParser(TOOLS).push('{"answer": 1') == ['{"answer": 1']


def test_a_call_is_returned_when_its_tag_closes() -> None:
    parser = AutoCallParser(TOOLS)
    pieces = parser.push(HERMES + "\nand")
    assert isinstance(pieces[0], CallDelta)
    assert pieces[1:] == ["\nand"]


def test_a_limit_drops_further_calls() -> None:
    two = '{"name": "look", "parameters": {}}; {"name": "add", "parameters": {}}'
    assert parse(AutoCallParser(TOOLS, limit=1), two, 3) == ("", [("look", {})])


def test_a_forced_call_streams_its_arguments() -> None:
    parser = ForcedCallParser("add")
    first, second = *parser.push('{"a"'), *parser.push(": 1}")
    assert isinstance(first, CallDelta)
    assert isinstance(second, CallDelta)
    assert (first.name, first.arguments, second.id, second.arguments) == ("add", '{"a"', None, ": 1}")
    assert parser.push("") == parser.flush() == []


def test_a_forced_choice() -> None:
    assert parse(ForcedChoiceParser(), '{"name": "x", "arguments": {"a": 1}}', 4) == ("", [("x", {"a": 1})])
    assert parse(ForcedChoiceParser(), '{"name": "x", "argu', 4) == ('{"name": "x", "argu', [])
