"""The formats of a model's answers, chosen from its chat template or by the server's settings.

`answer_parser` makes the parser of one answer.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from paceline.gateway.formats.call_bodies import (
    GLM_TAGS,
    MINIMAX_TAGS,
    QWEN_TAGS,
    CallBody,
    EitherBody,
    JsonBody,
    MakeBody,
    NamedBody,
    PythonBody,
    TagBody,
    Tags,
)
from paceline.gateway.formats.calls import CallFormat
from paceline.gateway.formats.harmony import MARKERS, HarmonyParser
from paceline.gateway.formats.pieces import AnswerParser, CallSink, Tools, short_call_id
from paceline.gateway.formats.reasoning import (
    BRACKETS,
    CHANNEL,
    GRANITE,
    THINK,
    ReasoningFormat,
    ReasoningParser,
    TextParser,
)

ToolParserName = Literal[
    "auto", "hermes", "qwen_xml", "glm", "minimax", "deepseek", "mistral", "llama", "phi4", "granite", "olmo", "harmony"
]
ReasoningParserName = Literal["auto", "none", "think", "brackets", "channel", "granite"]
TOOL_CALL = "<tool_call>"
TOOL_CALL_END = "</tool_call>"


def _wide(name: str) -> str:
    """A marker of DeepSeek, which has wide bars."""
    return f"<\uff5c{name}\uff5c>"


_SEPARATOR, _CALL_BEGIN, _CALL_END = _wide("tool▁sep"), _wide("tool▁call▁begin"), _wide("tool▁call▁end")
_DEEPSEEK_NAME = re.compile(rf"\s*(?:function{_SEPARATOR}([^\n]+)\n```(?:json)?\s*|([^<\n]+){_SEPARATOR}\s*)(?=\{{)")
_MISTRAL_NAME = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{)")


def _hermes(sink: CallSink) -> CallBody:
    return JsonBody(sink, TOOL_CALL_END)


def _tagged(tags: Tags) -> MakeBody:
    return lambda sink: EitherBody(sink, _hermes, lambda inner: TagBody(inner, tags))


def _mistral(sink: CallSink) -> CallBody:
    return EitherBody(sink, JsonBody, lambda inner: NamedBody(inner, _MISTRAL_NAME))


FORMATS: Mapping[str, CallFormat] = {
    found.name: found
    for found in (
        CallFormat("hermes", {TOOL_CALL: _tagged(QWEN_TAGS)}, call_end=TOOL_CALL_END),
        CallFormat("qwen_xml", {TOOL_CALL: _tagged(QWEN_TAGS)}, call_end=TOOL_CALL_END),
        CallFormat("glm", {TOOL_CALL: _tagged(GLM_TAGS)}, call_end=TOOL_CALL_END),
        CallFormat("minimax", {"<minimax:tool_call>": lambda sink: TagBody(sink, MINIMAX_TAGS)}, call_end="</invoke>"),
        CallFormat(
            "deepseek",
            {_CALL_BEGIN: lambda sink: NamedBody(sink, _DEEPSEEK_NAME, _CALL_END)},
            (_wide("tool▁calls▁begin"), _wide("tool▁calls▁end")),
            call_end=_CALL_END,
        ),
        CallFormat("mistral", {"[TOOL_CALLS]": _mistral}, new_id=short_call_id),
        CallFormat("llama", {"<|python_tag|>": JsonBody}, has_python=True),
        CallFormat(
            "phi4",
            {"functools": JsonBody, "<|tool_call|>": lambda sink: JsonBody(sink, "<|/tool_call|>")},
        ),
        CallFormat("granite", {"<|tool_call|>": JsonBody, TOOL_CALL: _hermes}),
        CallFormat("olmo", {"<function_calls>": lambda sink: PythonBody(sink, "</function_calls>")}),
        CallFormat("harmony", {}),
    )
}
_MARKS: tuple[tuple[str, str], ...] = (
    ("<|channel|>", "harmony"),
    ("[TOOL_CALLS]", "mistral"),
    ("<minimax:tool_call>", "minimax"),
    ("<arg_key>", "glm"),
    (_SEPARATOR, "deepseek"),
    ("<function=", "qwen_xml"),
    (TOOL_CALL, "hermes"),
    ("functools", "phi4"),
    ("message['tools']", "phi4"),
    ("<|tool_call|>", "granite"),
    ("<function_calls>", "olmo"),
    ("<|python_tag|>", "llama"),
    ("func_name1(", "llama"),
)
"""Texts of chat templates and the formats of calls that they belong to, the surest first."""
_REASONING: tuple[tuple[str, ReasoningFormat], ...] = (
    ("[THINK]", BRACKETS),
    ("<|channel>thought", CHANNEL),
    ("Here is my thought process", GRANITE),
    ("</think>", THINK),
    ("<think>", THINK),
)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes reasoning and calls."""

    calls: CallFormat
    reasoning: ReasoningFormat | None

    @staticmethod
    def of(template: str | None, calls: str = "auto", reasoning: str = "auto") -> "AnswerFormat":
        """The formats that the template shows, unless they are named. Calls of a model whose template has no tools are written
        as Hermes does."""
        text = template or ""
        if calls == "auto":
            calls = next((name for mark, name in _MARKS if mark in text), "hermes")
        named = {found.name: found for _, found in _REASONING}
        chosen = next((found for mark, found in _REASONING if mark in text), None)
        return AnswerFormat(FORMATS[calls], chosen if reasoning == "auto" else named.get(reasoning))

    @property
    def has_reasoning(self) -> bool:
        """Whether an answer may begin with reasoning."""
        return self._is_harmony or self.reasoning is not None

    def markers(self, has_calls: bool) -> frozenset[str]:
        """Texts that a parser looks for, with or without calls. Special tokens among them must be part of the text."""
        calls = MARKERS if self._is_harmony else self.calls.markers if has_calls else ()
        return frozenset(calls).union(self.reasoning.markers if self.reasoning is not None else ())

    def parser(self, prompt_end: str, tools: Tools | None, limit: int | None) -> AnswerParser:
        """The parser of an answer after this prompt. `tools` is None if no call may be made; at most `limit` calls are
        returned."""
        if self._is_harmony:
            return HarmonyParser(CallSink(tools or {}, limit, self.calls.new_id))
        answer = TextParser() if tools is None else self.calls.parser(tools, limit)
        if self.reasoning is None:
            return answer
        return ReasoningParser(self.reasoning, self.reasoning.is_open(prompt_end), answer)

    @property
    def _is_harmony(self) -> bool:
        return self.calls.name == "harmony"
