"""Generated text, cut at every character, through the parsers of reasoning and of tool calls.

The first byte of an input chooses the format of calls, the second the format of reasoning and the options; the rest is text.
"""

import zlib
from random import Random

from paceline.gateway.formats.calls import ForcedChoiceParser
from paceline.gateway.formats.choose import _REASONING, FORMATS, AnswerFormat
from paceline.gateway.formats.pieces import AnswerParser, CallDelta, Reasoning
from tests.fuzz.mutations import text_mutator
from tests.fuzz.target import FuzzTarget
from tests.gateway.formats.parsing import TOOLS

REASONING = (None, *(found for _, found in _REASONING))
LONGEST = 300
"""Characters of a text."""
NUM_CUTS = 8
FRAGMENTS = (
    *(marker for found in FORMATS.values() for marker in (*found.markers, found.call_end)),
    *(marker for _, found in _REASONING for marker in (found.start, found.end, *found.interrupts)),
    *(
        '{"name": "add", "arguments": {"a": 1}}',
        '{"name": "look", "arguments": {}}',
        '"arguments": "{\\"x\\": 2}"',
        "{{",
        "}}",
    ),
    *(
        "<function=add>",
        "<parameter=b>",
        "</parameter>",
        "</function>",
        '<invoke name="add">',
        '<parameter name="a">',
        "</invoke>",
    ),
    *(
        "<arg_key>b</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "add\n",
        "[ARGS]",
        "[CALL_ID]a1",
        "add(a=1, b='x')",
        "look()",
        "]",
    ),
    *(
        "<|channel|>analysis<|message|>",
        "<|start|>assistant",
        "<|channel|>commentary to=functions.add<|message|>",
        "<|end|>",
    ),
    *("\n", " ", "\\", '"', "```json\n", "```", ";", ",", "[", "{", "}", "\ufffd", "\U0001f600", "add", "null"),
)


def make_parser(choice: int, options: int) -> AnswerParser:
    if options & 128:
        return ForcedChoiceParser(TOOLS)
    calls = list(FORMATS.values())[choice % len(FORMATS)]
    reasoning = REASONING[options % len(REASONING)]
    limit = (None, 1, 2, None)[options >> 3 & 3]
    prompt = reasoning.start if reasoning is not None and options & 32 else "user"
    return AnswerFormat(calls, reasoning).parser(prompt, None if options & 64 else TOOLS, limit)


def joined(parser: AnswerParser, parts: list[str]) -> tuple[str, str, list[list[str]]]:
    """Text, reasoning, and name and arguments of the calls."""
    text, reasoning, calls = "", "", list[list[str]]()
    for piece in [piece for part in parts for piece in parser.push(part)] + parser.flush():
        if isinstance(piece, CallDelta):
            if piece.id is not None:
                assert piece.index == len(calls), f"call {piece.index} after {len(calls)}"
                assert piece.name is not None
                calls.append([piece.name, ""])
            calls[piece.index][1] += piece.arguments
        elif isinstance(piece, Reasoning):
            reasoning += piece.text
        else:
            text += piece
    return text, reasoning, calls


def fuzz(data: bytes) -> bool:
    if len(data) < 3:
        return False
    choice, options, text = data[0], data[1], data[2:].decode("utf-8", "ignore")[:LONGEST]
    whole = joined(make_parser(choice, options), [text])
    rng = Random(zlib.crc32(data))
    places = range(1, len(text))
    cuts = [[text[:at], text[at:]] for at in (places if len(places) <= NUM_CUTS else rng.sample(places, NUM_CUTS))]
    for parts in (*cuts, list(text), [text[at : at + 3] for at in range(0, len(text), 3)]):
        again = joined(make_parser(choice, options), parts)
        assert again == whole, f"{parts} gives {again}, not {whole}"
    if not options & 128:
        assert not (options & 64 and whole[2]) or list(FORMATS)[choice % len(FORMATS)] == "harmony"
    return True


TARGETS = {"formats": FuzzTarget(fuzz, text_mutator(FRAGMENTS), 1024)}
