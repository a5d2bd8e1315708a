"""Reads `{"name": …, "arguments": {…}}` as it is generated: the arguments are passed on as soon as the name is known.

Keys may come in another order, and `parameters` may take the place of `arguments`; such a call is read when it is complete.
"""

import json
import re
from typing import Any, Literal

from paceline.gateway.formats.pieces import CallSink, Tools

HEAD = re.compile(
    r'\s*(\{\{?)\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\S)'
)
"""A call up to its arguments. The template of Qwen2.5-Coder shows two braces, and the model writes them."""
FIRST_KEY = re.compile(r'\s*\{\{?\s*"([^"]*)"')
PARTIAL_FIRST_KEY = re.compile(r'\s*(\{\{?\s*("[^"]*)?)?$')
CALL_KEYS = frozenset({"name", "type", "parameters", "arguments"})
MAX_HEAD = 1024
"""Characters in which the arguments must begin, to be passed on before the call is complete."""


class NotACall(Exception):
    """The text is not a call of an offered tool."""


class ValueScanner:
    """Finds the end of a JSON object or array. Every character is read once."""

    def __init__(self) -> None:
        self.depth = 0
        self._is_text = self._is_escaped = False

    def scan(self, text: str, start: int, depth: int) -> int:
        """The place after the bracket that closes down to `depth`; -1 if it is not in the text."""
        for at in range(start, len(text)):
            char = text[at]
            if self._is_text:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._is_text = False
            elif char == '"':
                self._is_text = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth == depth:
                    return at + 1
        return -1


State = Literal["head", "whole", "arguments", "tail", "done"]


class JsonCall:
    """One call. `push` raises `NotACall` while nothing of it was passed on."""

    def __init__(self, sink: CallSink) -> None:
        self._sink, self._tools = sink, sink.tools
        self._scanner = ValueScanner()
        self._held = ""
        """Text of the call that was not passed on."""
        self._state: State = "head"
        self._num_braces = 1

    @property
    def has_begun(self) -> bool:
        """Whether a part of the call was passed on."""
        return self._state in ("arguments", "tail", "done")

    def push(self, text: str) -> str | None:
        """The text after the call; None if the call goes on."""
        if self._state == "head":
            return self._read_head(text)
        if self._state == "whole":
            return self._read_whole(text)
        if self._state == "arguments":
            end = self._scanner.scan(text, 0, self._num_braces)
            self._sink.add(text if end < 0 else text[:end])
            if end < 0:
                return None
            self._state, text = "tail", text[end:]
        end = self._scanner.scan(text, 0, 0)
        return None if end < 0 else text[end:]

    def _read_head(self, text: str) -> str | None:
        self._held += text
        key = FIRST_KEY.match(self._held)
        if (key is None and not PARTIAL_FIRST_KEY.match(self._held)) or (key is not None and key[1] not in CALL_KEYS):
            raise NotACall
        head = HEAD.match(self._held)
        if head is None:
            if len(self._held) < MAX_HEAD and not self._is_complete():
                return None
            held, self._held, self._state = self._held, "", "whole"
            return self._read_whole(held)
        if self._held[head.end()] != "{":  # the arguments are a text, or missing
            held, self._held, self._state = self._held, "", "whole"
            return self._read_whole(held)
        self._num_braces, name = len(head[1]), parsed(head[2])
        if name not in self._tools:
            raise NotACall
        rest, self._held = self._held[head.end() :], ""
        self._scanner.depth, self._state = self._num_braces, "arguments"
        end = self._scanner.scan(rest, 0, self._num_braces)
        self._sink.begin(name, rest if end < 0 else rest[:end])
        if end < 0:
            return None
        self._state = "tail"
        return self.push(rest[end:])

    def _is_complete(self) -> bool:
        return ValueScanner().scan(self._held, 0, 0) >= 0

    def _read_whole(self, text: str) -> str | None:
        end = self._scanner.scan(text, 0, 0)
        self._held += text if end < 0 else text[:end]
        if end < 0:
            return None
        call = whole_call(parsed(self._held), self._tools)
        if call is None:
            raise NotACall
        self._state = "done"
        self._sink.begin(*call)
        return text[end:]


def parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def whole_call(value: Any, tools: Tools | None) -> tuple[str, str] | None:
    """Name and JSON arguments if `value` calls one of `tools`; None in `tools` allows every name."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # some models write the arguments as a JSON string
        arguments = parsed(arguments)
    if not isinstance(arguments, dict) or (tools is not None and value["name"] not in tools):
        return None
    return value["name"], json.dumps(arguments, ensure_ascii=False)
