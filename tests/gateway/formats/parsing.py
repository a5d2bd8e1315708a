"""Runs a parser over a text that arrives in pieces."""

import json
from collections.abc import Iterator
from typing import Any

from paceline.gateway.formats.pieces import AnswerParser, CallDelta, Piece, Reasoning

TOOLS: dict[str, dict[str, Any]] = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "array"}},
    },
    "look": {"type": "object", "properties": {}},
    "get_current_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"}},
    },
}
Parsed = tuple[str, str, list[tuple[str, Any]]]
"""Text, reasoning and calls."""


def joined(pieces: list[Piece]) -> Parsed:
    calls: list[list[str]] = []
    for piece in pieces:
        if isinstance(piece, CallDelta):
            if piece.id is not None:
                assert piece.index == len(calls)
                calls.append([piece.name or "", ""])
            calls[piece.index][1] += piece.arguments
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    return text, reasoning, [(name, json.loads(arguments)) for name, arguments in calls]


def parse(parser: AnswerParser, *parts: str) -> Parsed:
    return joined([piece for part in parts for piece in parser.push(part)] + parser.flush())


def cuts(text: str) -> Iterator[tuple[str, ...]]:
    """The text as a whole, cut in two at every character, and cut at all of them."""
    yield (text,)
    yield from ((text[:at], text[at:]) for at in range(1, len(text)))
    yield tuple(text)
    for size in (2, 3, 7):
        yield tuple(text[at : at + size] for at in range(0, len(text), size))
