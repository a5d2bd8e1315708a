"""Answers of gpt-oss, cut at every character."""

import pytest

from paceline.gateway.formats.harmony import HarmonyParser
from paceline.gateway.formats.pieces import CallSink
from tests.gateway.formats.parsing import TOOLS, Parsed, cuts, parse

ANALYSIS = "<|channel|>analysis<|message|>User asks. <b>\n"
HARMONY: dict[str, tuple[str, Parsed]] = {
    "answer": (
        ANALYSIS + "<|end|><|start|>assistant<|channel|>final<|message|>Rome < Paris.<|return|>",
        ("Rome < Paris.", "User asks. <b>\n", []),
    ),
    "answer without an end": (
        ANALYSIS + "<|end|><|start|>assistant<|channel|>final<|message|>Rome.",
        ("Rome.", "User asks. <b>\n", []),
    ),
    "call": (
        ANALYSIS
        + '<|end|><|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"x": 1}<|call|>',
        ("", "User asks. <b>\n", [("look", {"x": 1})]),
    ),
    "recipient first": (
        ' to=functions.look<|channel|>commentary json<|message|>{"x": 1}<|call|>',
        ("", "", [("look", {"x": 1})]),
    ),
    "preamble and two calls": (
        "<|channel|>commentary<|message|>First this.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.look<|message|>{}"
        '<|call|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2}<|call|>',
        ("First this.", "", [("look", {}), ("add", {"a": 2})]),
    ),
    "tools of the model itself": (
        "<|channel|>analysis to=python code<|message|>print(1)<|call|>",
        ("", "print(1)", []),
    ),
    "plain text": ("Rome, <b>.", ("Rome, <b>.", "", [])),
    "cut in a header": (ANALYSIS + "<|end|><|start|>assistant<|chan", ("", "User asks. <b>\n", [])),
}


@pytest.mark.parametrize("name", HARMONY)
def test_every_cut_of_gpt_oss_gives_the_same_result(name: str) -> None:
    text, expected = HARMONY[name]
    for parts in cuts(text):
        assert parse(HarmonyParser(CallSink(TOOLS)), *parts) == expected, parts
