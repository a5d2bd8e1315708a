"""The parts of an answer: text, reasoning and calls of tools, and what all parsers of generated text share.

A parser receives the text of an answer in pieces, as it is generated, and returns the parts that it is sure of. The joined
parts do not depend on where the text was cut.
"""

import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

Tools = Mapping[str, Mapping[str, Any]]
"""JSON schema of the parameters of each offered tool, by name."""


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of call `index`. The first part of a call has its id and name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A part of the reasoning before an answer."""

    text: str


Piece = str | Reasoning | CallDelta


class AnswerParser(Protocol):
    """Splits generated text into answer text, reasoning and calls."""

    def push(self, text: str) -> list[Piece]:
        """The parts that `text` completes, in order."""
        ...

    def flush(self) -> list[Piece]:
        """The remaining parts, at the end of the output."""
        ...


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """An id as the templates of Mistral require it."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(slots=True)
class CallSink:
    """Collects the parts of calls, and numbers the calls."""

    tools: Tools
    limit: int | None = None
    """Calls to return; later ones are dropped."""
    new_id: Callable[[], str] = call_id
    pieces: list[Piece] = field(default_factory=list)
    count: int = 0
    """Calls that were begun, dropped ones included."""

    def text(self, text: str) -> None:
        if text:
            self.pieces.append(text)

    def begin(self, name: str, arguments: str = "") -> None:
        """Begin a call, with the first part of its arguments."""
        if self.limit is None or self.count < self.limit:
            self.pieces.append(CallDelta(self.count, arguments, self.new_id(), name))
        self.count += 1

    def add(self, arguments: str) -> None:
        """A further part of the arguments of the last call."""
        index = self.count - 1
        if not arguments or (self.limit is not None and index >= self.limit):
            return
        last = self.pieces[-1] if self.pieces else None
        if isinstance(last, CallDelta) and last.index == index:
            self.pieces[-1] = replace(last, arguments=last.arguments + arguments)
        else:
            self.pieces.append(CallDelta(index, arguments))

    def take(self) -> list[Piece]:
        pieces, self.pieces = self.pieces, []
        return pieces


def num_partial(text: str, markers: Iterable[str]) -> int:
    """Characters at the end of `text` that may be the start of a marker."""
    return max((_num_partial(text, marker) for marker in markers), default=0)


def _num_partial(text: str, marker: str) -> int:
    sizes = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((size for size in sizes if marker.startswith(text[-size:])), 0)


def first_marker(text: str, markers: Iterable[str]) -> tuple[int, str] | None:
    """Place and text of the first marker in `text`; of two at one place the longer one."""
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker)) >= 0]
    return (min(found)[0], min(found)[2]) if found else None
