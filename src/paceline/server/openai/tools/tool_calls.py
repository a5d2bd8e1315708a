"""Tool calls found in a model's text, while it is being written.

Two spellings are read: Hermes', `<tool_call>{"name": …, "arguments": {…}}</tool_call>` anywhere, and Llama 3's, a bare
`{"name": …, "parameters": {…}}`, perhaps after `<|python_tag|>`, at the very beginning, several parted by `;`. What is not
a call of a tool that was offered is text, whatever it looks like.
"""

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, Protocol

OPEN, CLOSE, PYTHON_TAG = "<tool_call>", "</tool_call>", "<|python_tag|>"
CALL_KEYS = frozenset({"name", "type", "parameters", "arguments"})
FIRST_KEY, FIRST_KEY_BEGUN = re.compile(r'\{\s*"([^"]*)"'), re.compile(r'\{\s*("[^"]*)?$')

Mode = Literal["start", "text", "tagged", "bare"]
"""Not decided yet; between calls; inside the tags of one; inside what began as bare JSON."""


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of the call number `index`. The first one of a call has its id and name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


Piece = str | CallDelta


class CallReader(Protocol):
    def push(self, text: str) -> list[Piece]:
        """Text that cannot be part of a call any more, and calls as far as they are certain, in order."""
        ...

    def flush(self) -> list[Piece]:
        """The rest, at the end of the text."""
        ...


class FreeCalls:
    """The model decides whether to call (`tool_choice: auto`)."""

    def __init__(self, tools: Collection[str], limit: int | None = None) -> None:
        """`limit`: calls beyond it are dropped."""
        self._tools = tools
        self._limit = limit
        self._held = ""
        self._gap = ""  # white space in front of the tag
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
        if self._mode == "tagged":  # the end of the text may stand for the closing tag
            self._add_call(held.removeprefix(OPEN), held, pieces)
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
        """One move along the held text; False when the next needs more of it."""
        if self._mode == "tagged":
            body, closed, rest = self._held.removeprefix(OPEN).partition(CLOSE)
            if not closed:
                return False
            self._add_call(body, OPEN + body + CLOSE, pieces)
            self._held, self._mode = rest, "text"
            return True
        before, opened, rest = self._held.partition(OPEN)
        if opened:
            # White space around a call is the template's, not the answer's
            text = before.rstrip()
            _add_text(text, pieces)
            self._gap, self._held, self._mode = before[len(text) :], OPEN + rest, "tagged"
            return True
        keep = _undecided(self._held)
        sure, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        _add_text(sure, pieces)
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


class ForcedCall:
    """The output is the arguments of one known tool, kept in shape by a grammar: pieces go out as they come."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[Piece]:
        if not text:
            return []
        name, self._name = self._name, None
        return [CallDelta(0, text, None if name is None else call_id(), name)]

    def flush(self) -> list[Piece]:
        return []


class ForcedChoice:
    """The output is `{"name": …, "arguments": …}` of one of the tools, kept in shape by a grammar."""

    def __init__(self) -> None:
        self._text: list[str] = []

    def push(self, text: str) -> list[Piece]:
        self._text.append(text)
        return []

    def flush(self) -> list[Piece]:
        text = "".join(self._text)
        call = _call(_parsed(text), None)
        return [text] if call is None else [CallDelta(0, call[1], call_id(), call[0])]  # cut off: as far as it came


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _add_text(text: str, pieces: list[Piece]) -> None:
    if text:
        pieces.append(text)


def _first_mode(start: str) -> Mode:
    """What the first characters that are not white space begin."""
    if start.startswith(PYTHON_TAG):
        return "bare"
    key = FIRST_KEY.match(start)
    if key is not None:
        return "bare" if key[1] in CALL_KEYS else "text"
    return "start" if PYTHON_TAG.startswith(start) or FIRST_KEY_BEGUN.match(start) else "text"


def _undecided(text: str) -> int:
    """Length of the end of `text` that may turn out to stand before, or to begin, a call: white space and part of a tag."""
    keep = next((size for size in range(min(len(OPEN) - 1, len(text)), 0, -1) if OPEN.startswith(text[-size:])), 0)
    return len(text) - len(text[: len(text) - keep].rstrip())


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _call(value: Any, tools: Collection[str] | None) -> tuple[str, str] | None:
    """Name and arguments, as JSON, if `value` is a call of one of `tools` (None: of whatever it names)."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # some models write the arguments as a string of JSON
        arguments = _parsed(arguments)
    if not isinstance(arguments, dict) or (tools is not None and value["name"] not in tools):
        return None
    return value["name"], json.dumps(arguments, ensure_ascii=False)


def _bare_calls(text: str, tools: Collection[str]) -> list[tuple[str, str]] | None:
    """Calls parted by `;`, or None unless all of `text` is that."""
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
