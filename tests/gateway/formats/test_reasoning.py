"""Reasoning before answers, in the published format of each family, cut at every character."""

import pytest

from paceline.gateway.formats.choose import FORMATS, AnswerFormat
from paceline.gateway.formats.pieces import Reasoning
from paceline.gateway.formats.reasoning import BRACKETS, CHANNEL, GRANITE, THINK, ReasoningFormat
from tests.gateway.formats.parsing import TOOLS, Parsed, cuts, parse

CASES: dict[str, tuple[ReasoningFormat, str, str, Parsed]] = {
    "qwen3": (THINK, "", "<think>\nLet me think.\n</think>\n\nRome.", ("Rome.", "Let me think.", [])),
    "qwen3, turned off": (THINK, "<think>\n\n</think>\n\n", "Rome < Paris.", ("Rome < Paris.", "", [])),
    "qwen3, empty": (THINK, "", "<think>\n\n</think>\n\nRome.", ("Rome.", "", [])),
    "opened by the prompt": (
        THINK,
        "<|im_start|>assistant\n<think>\n",
        "Hm, a </thing>.\n</think>\n\nRome.",
        ("Rome.", "Hm, a </thing>.", []),
    ),
    "only the end": (THINK, "<think>", "Hm.</think>Rome.", ("Rome.", "Hm.", [])),
    "cut inside": (THINK, "<think>", "Hm.\n\nAnd then ", ("", "Hm.\n\nAnd then", [])),
    "no reasoning": (THINK, "", "  Rome, <think> is a tag.", ("  Rome, <think> is a tag.", "", [])),
    "a call after it": (
        THINK,
        "<think>\n",
        'Look.\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>',
        ("", "Look.", [("look", {})]),
    ),
    "a call inside it": (
        THINK,
        "<think>\n",
        "A <tool_call> it is.\n\n<tool_call>\n<function=look>\n</function>\n</tool_call>",
        ("", "A <tool_call> it is.", [("look", {})]),
    ),
    "mistral": (BRACKETS, "", "[THINK]Hm.[/THINK]Rome.", ("Rome.", "Hm.", [])),
    "gemma 4": (CHANNEL, "", "<|channel>thought\nHm.\n<channel|>Rome.", ("Rome.", "Hm.", [])),
    "granite": (GRANITE, "", "Here is my thought process: Hm.\n\nHere is my response: Rome.", ("Rome.", "Hm.", [])),
}


@pytest.mark.parametrize("name", CASES)
def test_every_cut_gives_the_same_result(name: str) -> None:
    reasoning, prompt_end, text, expected = CASES[name]
    format_ = AnswerFormat(FORMATS["qwen_xml"], reasoning)
    for parts in cuts(text):
        assert parse(format_.parser(prompt_end, TOOLS, None), *parts) == expected, parts


def test_reasoning_is_returned_as_early_as_possible() -> None:
    parser = AnswerFormat(FORMATS["hermes"], THINK).parser("<think>\n", None, None)
    assert parser.push("\nLet me") == [Reasoning("Let me")]
    assert parser.push(" think") == [Reasoning(" think")]
    assert parser.push(".\n</thi") == [Reasoning(".")]
    assert parser.push("nk>\n\nRome") == ["Rome"]
    assert parser.push(" it") == [" it"]
