"""How a request uses tools: their place in the prompt, the grammar of a forced call, and the calls in generated text.

The parser reads two formats. Hermes: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` anywhere in the text. Llama 3:
`{"name": …, "parameters": {…}}` at the start, optionally after `<|python_tag|>`, several calls separated by `;`. Anything that
is not a call of an offered tool stays text.
"""

import json
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from paceline.core.errors import InvalidRequest
from paceline.core.request import Constraint
from paceline.gateway.api.chat_bodies import ChatBody
from paceline.gateway.api.messages import AnyTool, CustomTool, Function

OPEN_TAG, CLOSE_TAG, PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
CALL_KEYS = frozenset({"name", "type", "parameters", "arguments"})
FIRST_KEY, PARTIAL_FIRST_KEY = re.compile(r'\{\s*"([^"]*)"'), re.compile(r'\{\s*("[^"]*)?$')

Mode = Literal["start", "text", "tagged", "bare"]
"""Undecided; between calls; inside the tags of a call; inside JSON without tags."""


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of call `index`. The first part of a call has its id and name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


Piece = str | CallDelta


class ToolCallParser(Protocol):
    """Splits generated text into answer text and tool calls."""

    def push(self, text: str) -> list[Piece]:
        """The text and call parts that `text` completes, in order."""
        ...

    def flush(self) -> list[Piece]:
        """The remaining parts, at the end of the output."""
        ...


class AutoCallParser:
    """For `tool_choice: auto`: the model decides whether to call a tool."""

    def __init__(self, tools: Collection[str], limit: int | None = None) -> None:
        """`limit` is the number of calls to return. The parser drops later calls."""
        self._tools = tools
        self._limit = limit
        self._held = ""
        self._gap = ""  # white space before the tag
        self._mode: Mode = "start"
        self._count = 0

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        if self._mode == "start":
            self._mode = _first_mode(self._held.lstrip())
        while self._mode in ("text", "tagged") and self._advance(pieces):
            pass
        return pieces

    def flush(self) -> list[Piece]:
        pieces: list[Piece] = []
        held, self._held = self._held, ""
        if self._mode == "tagged":  # the output may end without the closing tag
            self._add_call(held.removeprefix(OPEN_TAG), held, pieces)
        elif self._mode == "bare":
            calls = _bare_calls(held.lstrip().removeprefix(PYTHON_TAG), self._tools)
            for call in calls or ():
                self._emit(*call, pieces)
            if calls is None:
                _add_text(held, pieces)
        elif held.strip() or not self._count:
            _add_text(held, pieces)
        return pieces

    def _advance(self, pieces: list[Piece]) -> bool:
        """Parses one part of the held text; False if it needs more text."""
        if self._mode == "tagged":
            body, closed, rest = self._held.removeprefix(OPEN_TAG).partition(CLOSE_TAG)
            if not closed:
                return False
            self._add_call(body, OPEN_TAG + body + CLOSE_TAG, pieces)
            self._held, self._mode = rest, "text"
            return True
        before, opened, rest = self._held.partition(OPEN_TAG)
        if opened:
            # The template writes white space around a call; it is not part of the answer
            text = before.rstrip()
            _add_text(text, pieces)
            self._gap, self._held, self._mode = before[len(text) :], OPEN_TAG + rest, "tagged"
            return True
        keep = _num_undecided(self._held)
        decided, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        _add_text(decided, pieces)
        return False

    def _add_call(self, body: str, raw: str, pieces: list[Piece]) -> None:
        call = _call(_parsed(body), self._tools)
        if call is None:
            _add_text(self._gap + raw, pieces)
        else:
            self._emit(*call, pieces)

    def _emit(self, name: str, arguments: str, pieces: list[Piece]) -> None:
        if self._limit is None or self._count < self._limit:
            pieces.append(CallDelta(self._count, arguments, call_id(), name))
            self._count += 1


class ForcedCallParser:
    """For a forced call of one tool. The grammar limits the output to its arguments, so every piece is returned at once."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[Piece]:
        if not text:
            return []
        name, self._name = self._name, None
        return [CallDelta(0, text, None if name is None else call_id(), name)]

    def flush(self) -> list[Piece]:
        return []


class ForcedChoiceParser:
    """For a forced call of any tool. The grammar limits the output to `{"name": …, "arguments": …}`."""

    def __init__(self) -> None:
        self._text: list[str] = []

    def push(self, text: str) -> list[Piece]:
        self._text.append(text)
        return []

    def flush(self) -> list[Piece]:
        text = "".join(self._text)
        call = _call(_parsed(text), None)
        return [text] if call is None else [CallDelta(0, call[1], call_id(), call[0])]  # a truncated call is text


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _add_text(text: str, pieces: list[Piece]) -> None:
    if text:
        pieces.append(text)


def _first_mode(start: str) -> Mode:
    """The mode that the first characters select, without leading white space."""
    if start.startswith(PYTHON_TAG):
        return "bare"
    key = FIRST_KEY.match(start)
    if key is not None:
        return "bare" if key[1] in CALL_KEYS else "text"
    return "start" if PYTHON_TAG.startswith(start) or PARTIAL_FIRST_KEY.match(start) else "text"


def _num_undecided(text: str) -> int:
    """Characters at the end of `text` that may belong to a call: white space and a partial tag."""
    keep = next(
        (size for size in range(min(len(OPEN_TAG) - 1, len(text)), 0, -1) if OPEN_TAG.startswith(text[-size:])), 0
    )
    return len(text) - len(text[: len(text) - keep].rstrip())


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(value: Any, tools: Collection[str] | None) -> tuple[str, str] | None:
    """Name and JSON arguments if `value` calls one of `tools`; None in `tools` allows every name."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # some models write the arguments as a JSON string
        arguments = _parsed(arguments)
    if not isinstance(arguments, dict) or (tools is not None and value["name"] not in tools):
        return None
    return value["name"], json.dumps(arguments, ensure_ascii=False)


def _bare_calls(text: str, tools: Collection[str]) -> list[tuple[str, str]] | None:
    """The calls in `text`, separated by `;`; None if it contains anything else."""
    calls, rest, decoder = [], text.strip(), json.JSONDecoder()
    while rest:
        try:
            value, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            return None
        call = _call(value, tools)
        if call is None:
            return None
        calls.append(call)
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return calls or None


NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a request uses tools: their place in the prompt, the grammar and the parser of the output."""

    tools: tuple[AnyTool, ...]
    """The tools in the prompt."""
    callable_names: frozenset[str]
    """Names of the tools that may be called."""
    json_schema: Mapping[str, Any] | None
    """Schema of the output if a call or a form of the answer is forced, otherwise None."""
    stops: tuple[str, ...]
    parallel: bool
    is_forced: bool
    """Whether the output is one call."""
    forced: str | None
    """Name of the forced tool; None if the model selects one."""

    @staticmethod
    def from_body(body: ChatBody, answer_form: Constraint | None = None) -> "ToolUse | None":
        """None if the request has no tools or sets `tool_choice: none`. `answer_form` is the form of an answer without a call.
        If it is a JSON schema, the output is such an answer, or a call as JSON without tags."""
        if not body.tools or body.tool_choice == "none":
            return None
        tools, chosen, parallel = tuple(body.tools), body.chosen_tools, body.parallel_tool_calls
        functions = [tool.function for tool in tools if chosen is None or tool.function.name in chosen]
        names = frozenset(function.name for function in functions)
        if body.is_call_forced and len(functions) == 1:
            return ToolUse(
                tools, names, functions[0].parameters or NO_PARAMETERS, (), parallel, True, functions[0].name
            )
        if body.is_call_forced:
            return ToolUse(tools, names, _any_call_schema(functions), (), parallel, True, None)
        if isinstance(answer_form, str):
            raise InvalidRequest(
                "a grammar of the answer excludes tool calls: set tool_choice to none, or send a JSON schema",
                "tool_choice",
            )
        schema = None if answer_form is None else _any_call_schema(functions, answer_form)
        stops = () if parallel else (CLOSE_TAG,)
        return ToolUse(tools, names, schema, stops, parallel, False, None)

    @property
    def custom_names(self) -> frozenset[str]:
        """Names of the tools whose input is a text."""
        return frozenset(tool.function.name for tool in self.tools if isinstance(tool, CustomTool))

    def parser(self) -> ToolCallParser:
        """A new parser; every choice needs its own."""
        if self.forced is not None:
            return ForcedCallParser(self.forced)
        if self.is_forced:
            return ForcedChoiceParser()
        return AutoCallParser(self.callable_names, None if self.parallel else 1)


def _any_call_schema(functions: Sequence[Function], answer: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A call of one of the functions, or the answer."""
    schemas = [_call_schema(function, f"#/anyOf/{i}") for i, function in enumerate(functions)]
    if answer is not None:
        schemas.append(_move_refs(answer, f"#/anyOf/{len(schemas)}"))
    return {"anyOf": schemas}


def _call_schema(function: Function, position: str) -> dict[str, Any]:
    parameters = _move_refs(function.parameters or NO_PARAMETERS, f"{position}/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _move_refs(schema: Any, root: str) -> Any:
    """`schema` with its internal references rewritten for its new position `root`."""
    if isinstance(schema, Mapping):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and value[:1] == "#"
            else _move_refs(value, root)
            for key, value in schema.items()
        }
    return [_move_refs(item, root) for item in schema] if isinstance(schema, list) else schema
