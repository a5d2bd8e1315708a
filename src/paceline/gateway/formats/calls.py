"""Finds the calls of tools in generated text, in the format that the model writes.

`CallParser` is for calls that the model chooses to make. `ForcedCallParser` and `ForcedChoiceParser` are for calls that a
grammar forces, which have no markers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.gateway.formats.call_bodies import CallBody, JsonBody, MakeBody, PythonBody
from paceline.gateway.formats.json_call import NotACall, parsed, whole_call
from paceline.gateway.formats.pieces import (
    CallDelta,
    CallSink,
    Piece,
    Tools,
    call_id,
    first_marker,
    num_partial,
)

FENCE = "```json"


def _bare_json(sink: CallSink) -> CallBody:
    return JsonBody(sink)


def _fenced_json(sink: CallSink) -> CallBody:
    return JsonBody(sink, "```")


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models writes calls."""

    name: str
    opens: Mapping[str, MakeBody]
    """What follows each marker that opens a call."""
    drops: tuple[str, ...] = ()
    """Markers around calls, which are not part of the answer."""
    has_python: bool = False
    """Whether the text may be a list of Python calls."""
    call_end: str = ""
    """Text after which a call is complete. Empty if there is none for all of its calls."""
    new_id: Callable[[], str] = field(default=call_id)

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that a model must write as they are; some are special tokens."""
        return (*self.opens, *self.drops)

    def parser(self, tools: Tools, limit: int | None) -> "CallParser":
        """A parser of one answer, which returns at most `limit` calls."""
        return CallParser(self, CallSink(tools, limit, self.new_id))


class CallParser:
    """For `tool_choice: auto`. Whatever is not a call of an offered tool stays text."""

    def __init__(self, format_: CallFormat, sink: CallSink) -> None:
        self._sink = sink
        self._opens: Mapping[str, MakeBody] = {**format_.opens, FENCE: _fenced_json}
        self._markers = (*self._opens, *format_.drops)
        self._has_python = format_.has_python
        self._held = ""
        self._gap = ""
        """White space before the call that is read: it belongs to the call, if it is one."""
        self._is_start = True
        self._body: CallBody | None = None
        self._marker, self._raw = "", ""
        """The marker of the call that is read, and the text after it."""

    def push(self, text: str) -> list[Piece]:
        self._held += text
        while self._advance():
            pass
        return self._sink.take()

    def flush(self) -> list[Piece]:
        while True:
            if self._body is None:
                if self._held.strip() or not self._sink.count:
                    self._sink.text(self._held)
                self._held = ""
                return self._sink.take()
            try:
                self._body.end()
            except NotACall:
                self._reject()
                while self._advance():
                    pass
                continue
            self._body, self._held = None, ""

    def _advance(self) -> bool:
        """Read a part of the held text; False if that needs more text."""
        if self._body is not None:
            return self._read_body()
        if self._is_start:
            return self._read_start()
        found = first_marker(self._held, self._markers)
        if found is None:
            # White space before a call is held back: the template writes it, and it is no part of the answer
            decided = self._held[: len(self._held) - num_partial(self._held, self._markers)].rstrip()
            self._sink.text(decided)
            self._held = self._held[len(decided) :]
            return False
        at, marker = found
        text = self._held[:at].rstrip()
        self._sink.text(text)
        gap, self._held = self._held[len(text) : at], self._held[at + len(marker) :]
        if marker in self._opens:
            self._open(marker, self._opens[marker], gap)
        return True

    def _read_start(self) -> bool:
        """Calls without a marker are the whole text."""
        start = self._held.lstrip()
        if not start:
            return False
        self._is_start = False
        if start[0] == "{":
            gap, self._held = self._held[: len(self._held) - len(start)], start
            self._open("", _bare_json, gap)
        elif start[0] == "[" and self._has_python:
            gap, self._held = self._held[: len(self._held) - len(start)], start[1:]
            self._open("[", lambda sink: PythonBody(sink, "]"), gap)
        return True

    def _open(self, marker: str, make: MakeBody, gap: str) -> None:
        self._marker, self._raw, self._gap = marker, "", gap
        self._body = make(self._sink)

    def _read_body(self) -> bool:
        assert self._body is not None
        if not self._held:
            return False
        text, self._held = self._held, ""
        self._raw += text
        try:
            rest = self._body.push(text)
        except NotACall:
            self._reject()
            return True
        if rest is None:
            return False
        self._body, self._raw, self._held = None, "", rest
        return True

    def _reject(self) -> None:
        """What was read is no call: its marker is text, and the text after it may have other calls."""
        self._sink.text(self._gap + self._marker)
        self._body, self._held = None, self._raw + self._held


class ForcedCallParser:
    """For a forced call of one tool. The grammar limits the output to its arguments, so every piece is returned at once."""

    def __init__(self, name: str, new_id: Callable[[], str] = call_id) -> None:
        self._name: str | None = name
        self._new_id = new_id

    def push(self, text: str) -> list[Piece]:
        if not text:
            return []
        name, self._name = self._name, None
        return [CallDelta(0, text, None if name is None else self._new_id(), name)]

    def flush(self) -> list[Piece]:
        return []


class ForcedChoiceParser:
    """For a forced call of any tool. The grammar limits the output to `{"name": …, "arguments": …}`."""

    def __init__(self, tools: Tools, new_id: Callable[[], str] = call_id) -> None:
        self._sink = CallSink(tools, 1, new_id)
        self._body, self._text = JsonBody(self._sink), ""
        self._is_refused = False

    def push(self, text: str) -> list[Piece]:
        self._text += text
        if text and not self._is_refused:
            try:
                self._body.push(text)
            except NotACall:
                self._is_refused = True
        return self._sink.take()

    def flush(self) -> list[Piece]:
        if self._sink.count:
            return self._sink.take()
        call = whole_call(parsed(self._text), None)
        if call is None:
            return [self._text]  # a truncated call is text
        self._sink.begin(*call)
        return self._sink.take()
