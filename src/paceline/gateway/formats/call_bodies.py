"""What may follow the marker of a call: one class for each way of writing calls.

A body reads the text after its marker. `push` returns the text after its end, or None while it needs more. It raises `NotACall`
if the text is not a call, which it may do only before it has passed on a part of a call.
"""

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.gateway.formats.json_call import JsonCall, NotACall, ValueScanner
from paceline.gateway.formats.pieces import CallSink


class CallBody(Protocol):
    def push(self, text: str) -> str | None: ...

    def end(self) -> None:
        """The output ends here. Raises `NotACall` if what was read is not a call."""
        ...


class JsonBody:
    """One call as JSON, a list of calls, or calls with `;` between them; then perhaps a closing marker."""

    def __init__(self, sink: CallSink, close: str = "") -> None:
        self._sink, self._close = sink, close
        self._held = ""
        self._call: JsonCall | None = None
        self._raw = ""
        """What the call was given."""
        self._num_calls = 0
        self._is_list = False

    def push(self, text: str) -> str | None:
        self._held += text
        while True:
            if self._call is None:
                rest = self._held.lstrip()
                if self._num_calls == 0 and not self._is_list and rest.startswith("["):
                    self._is_list, self._held = True, rest[1:]
                    continue
                if self._num_calls and not self._goes_on(rest):
                    return self._after(rest)
                if not rest or (self._num_calls and len(rest) < 2):
                    return None
                self._held = rest[1:] if self._num_calls and rest[0] in ",;" else rest
                self._call = JsonCall(self._sink)
            text, self._held = self._held, ""
            self._raw += text
            after = self._read(text)
            if after is None:
                return None
            self._call, self._held, self._raw = None, after, ""
            self._num_calls += 1

    def end(self) -> None:
        if self._num_calls == 0 and (self._call is None or not self._call.has_begun):
            raise NotACall

    def _read(self, text: str) -> str | None:
        assert self._call is not None
        try:
            return self._call.push(text)
        except NotACall:
            if self._num_calls == 0:
                raise
            return self._raw  # calls were passed on: what follows them is text

    def _goes_on(self, rest: str) -> bool:
        """Whether another call may follow, after at least one."""
        if self._is_list:
            return not rest or rest[0] == ","
        return not self._close and (not rest or rest[0] == ";")

    def _after(self, rest: str) -> str | None:
        """The text after the list and the closing marker; None if they may still come."""
        if self._is_list and rest.startswith("]"):
            self._is_list, rest = False, rest[1:].lstrip()
            self._held = rest
        if not self._close:
            return rest
        end = rest.lstrip("}] \t\r\n")  # small models close more brackets than they open
        if end.startswith(self._close):
            return end[len(self._close) :]
        return None if self._close.startswith(end) else rest


@dataclass(frozen=True, slots=True)
class Tags:
    """How a call is written with a tag for each argument. The expressions match up to a value."""

    name: re.Pattern[str]
    key: re.Pattern[str]
    """Group 1 is the name of an argument."""
    value_end: str
    end: re.Pattern[str]
    """The end of a call, and of the markers around it if no other call follows."""
    again: re.Pattern[str] | None = None
    """The start of a further call after the end of one."""


QWEN_TAGS = Tags(
    re.compile(r"\s*<function=([^>\s]+)>"),
    re.compile(r"\s*<parameter=([^>]+)>"),
    "</parameter>",
    re.compile(r"\s*</function>(?:\s*</tool_call>)?"),
)
GLM_TAGS = Tags(
    re.compile(r"\s*([^\s<]+)(?=\s*<)"),
    re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>"),
    "</arg_value>",
    re.compile(r"\s*</tool_call>"),
)
MINIMAX_TAGS = Tags(
    re.compile(r'\s*<invoke name="([^"]+)">'),
    re.compile(r'\s*<parameter name="([^"]+)">'),
    "</parameter>",
    re.compile(r"\s*</invoke>(?:\s*</minimax:tool_call>)?"),
    re.compile(r"\s*(?=<invoke )"),
)
MAX_TAG = 512
"""Characters of a tag with a name, and of the white space before it."""


class TagBody:
    """A call with a tag for each argument. Text arguments are passed on as they come, others when they are complete."""

    def __init__(self, sink: CallSink, tags: Tags) -> None:
        self._sink, self._tags = sink, tags
        self._held = ""
        self._schema: Mapping[str, Any] | None = None
        """Schemas of the arguments; None before the name."""
        self._num_arguments = 0
        self._key: str | None = None
        self._is_text = self._has_value = False

    def push(self, text: str) -> str | None:
        self._held += text
        while True:
            if self._schema is None:
                if not self._read_name():
                    return None
            elif self._key is not None:
                if not self._read_value():
                    return None
            else:
                key, end = self._tags.key.match(self._held), self._tags.end.match(self._held)
                if end is not None and (self._is_sure(end) or key is not None):
                    return self._finish(end)
                if key is None:
                    return None
                self._begin_argument(key)

    def end(self) -> None:
        if self._schema is None:
            raise NotACall
        if self._key is not None and self._is_text:
            self._sink.add(_escaped(self._held.rstrip("\n")) + '"')
        elif self._key is not None:
            self._sink.add(self._typed(self._held))
        self._sink.add("}")

    def _is_sure(self, end: re.Match[str]) -> bool:
        """Whether no longer end can match when more text comes."""
        rest = self._held[end.end() :].lstrip()
        closing = ("</tool_call>", "</minimax:tool_call>")
        if end[0].endswith(closing):
            return True
        following = closing if self._tags.again is None else (*closing, "<invoke ")
        return not any(len(rest) < len(tag) and tag.startswith(rest) for tag in following)

    def _read_name(self) -> bool:
        match = self._tags.name.match(self._held)
        if match is None:
            start = self._held.lstrip()
            if len(start) > MAX_TAG or (start and start[0] == "{"):
                raise NotACall
            return False
        schema = self._sink.tools.get(match[1])
        if schema is None:
            raise NotACall
        self._schema = schema.get("properties") or {}
        self._held = self._held[match.end() :]
        self._sink.begin(match[1], "{")
        return True

    def _begin_argument(self, key: re.Match[str]) -> None:
        assert self._schema is not None
        self._key, self._held = key[1].strip(), self._held[key.end() :]
        self._is_text, self._has_value = _is_text(self._schema.get(self._key)), False
        comma = ", " if self._num_arguments else ""
        self._sink.add(f"{comma}{json.dumps(self._key, ensure_ascii=False)}: " + ('"' if self._is_text else ""))
        self._num_arguments += 1

    def _read_value(self) -> bool:
        if not self._has_value:  # one newline before the value belongs to the tag
            if not self._held:
                return False
            self._held, self._has_value = self._held.removeprefix("\n"), True
        value, closed, rest = self._held.partition(self._tags.value_end)
        if closed:
            value = value.removesuffix("\n")
            self._sink.add(_escaped(value) + '"' if self._is_text else self._typed(value))
            self._key, self._held = None, rest
            return True
        if self._is_text:
            ends = (self._tags.value_end, "\n" + self._tags.value_end)
            keep = max(
                next((n for n in range(min(len(end) - 1, len(value)), 0, -1) if end.startswith(value[-n:])), 0)
                for end in ends
            )
            self._sink.add(_escaped(value[: len(value) - keep]))
            self._held = value[len(value) - keep :]
        return False

    def _typed(self, value: str) -> str:
        """The value as JSON: as it is if it is JSON, otherwise a text."""
        try:
            return json.dumps(json.loads(value), ensure_ascii=False)
        except (ValueError, RecursionError):
            literal = {"True": "true", "False": "false", "None": "null"}.get(value.strip())
            return literal or json.dumps(value, ensure_ascii=False)

    def _finish(self, end: re.Match[str]) -> str | None:
        self._sink.add("}")
        rest = self._held[end.end() :]
        if self._tags.again is not None and self._tags.again.match(rest):
            self._schema, self._num_arguments, self._held = None, 0, ""
            return self.push(rest)
        return rest


def _is_text(schema: Any) -> bool:
    """Whether an argument of this schema is a text: its value is then not read as JSON."""
    if not isinstance(schema, Mapping):
        return False
    kind = schema.get("type")
    if kind is None and isinstance(schema.get("enum"), list):
        return all(isinstance(value, str) for value in schema["enum"])
    return kind == "string"


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


class NamedBody:
    """A name, then the arguments as JSON: `name[ARGS]{…}`. `name` matches up to the arguments; its last group is the name."""

    def __init__(self, sink: CallSink, name: re.Pattern[str], end: str = "") -> None:
        """`end` is a text that closes the call: text before it is dropped."""
        self._sink, self._name, self._end = sink, name, end
        self._held, self._state = "", "name"
        self._scanner = ValueScanner()

    def push(self, text: str) -> str | None:
        if self._state == "name":
            self._held += text
            match = self._name.match(self._held)
            if match is None:
                if len(self._held) > MAX_TAG:
                    raise NotACall
                return None
            name = match[match.lastindex or 1]
            if name not in self._sink.tools:
                raise NotACall
            text, self._held, self._state = self._held[match.end() :], "", "arguments"
            self._sink.begin(name)
        if self._state == "arguments":
            end = self._scanner.scan(text, 0, 0)
            self._sink.add(text if end < 0 else text[:end])
            if end < 0:
                return None
            if not self._end:
                return text[end:]
            text, self._state = text[end:], "end"
        self._held += text
        _, closed, rest = self._held.partition(self._end)
        return rest if closed else None

    def end(self) -> None:
        if self._state == "name":
            raise NotACall


class PythonBody:
    """Python calls: `[f(a=1), g(b="x")]`, or one a line. Each call is passed on when it is complete."""

    def __init__(self, sink: CallSink, close: str) -> None:
        self._sink, self._close = sink, close
        self._held = ""
        self._scanner = _CallScanner()
        self._num_calls = 0

    def push(self, text: str) -> str | None:
        self._held += text
        while True:
            rest = self._held.lstrip(" \t\r\n,")
            if rest.startswith(self._close):
                if not self._num_calls:
                    raise NotACall
                return rest[len(self._close) :]
            if not rest or self._close.startswith(rest):
                return None
            if re.match(r"[A-Za-z_][\w.-]*(\(|$)", rest) is None:
                if self._num_calls:
                    return rest
                raise NotACall
            end = self._scanner.end_of(rest)
            if end < 0:
                self._held = rest
                return None
            call = _python_call(rest[:end], self._sink)
            if call is None:
                if self._num_calls:
                    return rest
                raise NotACall
            self._sink.begin(*call)
            self._num_calls += 1
            self._held, self._scanner = rest[end:], _CallScanner()

    def end(self) -> None:
        if not self._num_calls:
            raise NotACall


class _CallScanner:
    """Finds the end of a Python call, across several texts that begin alike."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def end_of(self, text: str) -> int:
        for at in range(self._at, len(text)):
            char = text[at]
            if self._quote:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == self._quote:
                    self._quote = ""
            elif char in "'\"":
                self._quote = char
            elif char in "([{":
                self._depth += 1
            elif char in ")]}":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        self._at = len(text)
        return -1


_NAMES = {"true": True, "false": False, "null": None}


def _python_call(text: str, sink: CallSink) -> tuple[str, str] | None:
    """Name and JSON arguments of one call with literal arguments by name; None if it is none."""
    name, _, inside = text.partition("(")
    if name not in sink.tools:
        return None
    try:
        call = ast.parse(f"f({inside}", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            return None
        return name, json.dumps({word.arg: _literal(word.value) for word in call.keywords}, ensure_ascii=False)
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError, AssertionError):
        return None


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {
            ast.literal_eval(key): _literal(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    return ast.literal_eval(node)


MakeBody = Callable[[CallSink], CallBody]


class EitherBody:
    """JSON if the text begins with a bracket, otherwise another body: models of one format sometimes write the other."""

    def __init__(self, sink: CallSink, json_body: MakeBody, other: MakeBody) -> None:
        self._sink, self._json_body, self._other = sink, json_body, other
        self._body: CallBody | None = None

    def push(self, text: str) -> str | None:
        if self._body is None:
            start = text.lstrip()
            if not start:
                return None
            self._body = (self._json_body if start[0] in "{[" else self._other)(self._sink)
        return self._body.push(text)

    def end(self) -> None:
        if self._body is None:
            raise NotACall
        self._body.end()
