"""The formats that chat templates show."""

import pytest

from paceline.gateway.formats.choose import AnswerFormat
from paceline.gateway.formats.reasoning import GRANITE

TEMPLATES = {
    "Qwen2.5": ('{\'name\': <tool_call>\\n{"name": <function-name>, "arguments":', "hermes", None),
    "Qwen3": ('<tool_call> "arguments": <think> </think>', "hermes", "think"),
    "Qwen3-Coder": ("<tool_call>\n<function=example>\n<parameter=p>", "qwen_xml", None),
    "Qwen3.5": ("<tool_call>\n<function=example>\n<parameter=p> <think>\n", "qwen_xml", "think"),
    "GLM-4.6": ("<tool_call>{function-name}\n<arg_key>{k}</arg_key> <think></think>", "glm", "think"),
    "MiniMax-M2": ("<minimax:tool_call> <invoke name= <think>", "minimax", "think"),
    "DeepSeek-V3.1": ("<\uff5ctool▁call▁begin\uff5c>x<\uff5ctool▁sep\uff5c> <think>", "deepseek", "think"),
    "Mistral Small": ("[TOOL_CALLS] [ARGS]", "mistral", None),
    "Magistral": ("[TOOL_CALLS] [ARGS] [THINK]", "mistral", "brackets"),
    "Llama 3.2": ('<|python_tag|> "parameters":', "llama", None),
    "gpt-oss": ("<|channel|>analysis<|message|>", "harmony", None),
    "Gemma 4": ("<|channel>thought", "hermes", "channel"),
    "Phi-4-mini": ("{{ message['tools'] }} <|tool|>", "phi4", None),
    "Granite 3.2": ("<|tool_call|> Here is my thought process:", "granite", "granite"),
    "Granite 4": ('<tool_call>\n{"name": <function-name>, "arguments":', "hermes", None),
    "OLMo 3": ("<function_calls>", "olmo", None),
    "without tools": ("{{ messages }}", "hermes", None),
    "none": (None, "hermes", None),
}


@pytest.mark.parametrize("model", TEMPLATES)
def test_the_template_shows_the_formats(model: str) -> None:
    template, calls, reasoning = TEMPLATES[model]
    found = AnswerFormat.of(template)
    assert (found.calls.name, found.reasoning and found.reasoning.name) == (calls, reasoning)
    named = AnswerFormat.of(template, "glm", "granite")
    assert (named.calls.name, named.reasoning) == ("glm", GRANITE)
    assert AnswerFormat.of(template, reasoning="none").reasoning is None


def test_markers_are_those_that_a_parser_needs() -> None:
    qwen = AnswerFormat.of("<tool_call> </think>")
    assert qwen.markers(has_calls=True) == {"<tool_call>", "<think>", "</think>"}
    assert qwen.markers(has_calls=False) == {"<think>", "</think>"}
    assert "<|message|>" in AnswerFormat.of("<|channel|>").markers(has_calls=False)
