"""How a request uses tools: their place in the prompt, the grammar of a forced call, and the parser of its answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import InvalidRequest
from paceline.core.request import Constraint
from paceline.gateway.api.chat_bodies import ChatBody
from paceline.gateway.api.messages import AnyTool, CustomTool, Function
from paceline.gateway.formats import (
    AnswerFormat,
    AnswerParser,
    ForcedCallParser,
    ForcedChoiceParser,
    TextParser,
    Tools,
)

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a request uses tools: their place in the prompt, the grammar and the parser of the output."""

    tools: tuple[AnyTool, ...]
    """The tools in the prompt."""
    callable_names: frozenset[str]
    """Names of the tools that may be called."""
    json_schema: Mapping[str, Any] | None
    """Schema of the output if a call or a form of the answer is forced, otherwise None."""
    parallel: bool
    is_forced: bool
    """Whether the output is one call."""
    forced: str | None
    """Name of the forced tool; None if the model selects one."""

    @staticmethod
    def from_body(body: ChatBody, answer_form: Constraint | None = None) -> "ToolUse | None":
        """None if the request has no tools or sets `tool_choice: none`. `answer_form` is the form of an answer without a call.
        If it is a JSON schema, the output is such an answer, or a call as JSON without tags."""
        if not body.tools or body.tool_choice == "none":
            return None
        tools, chosen, parallel = tuple(body.tools), body.chosen_tools, body.parallel_tool_calls
        functions = [tool.function for tool in tools if chosen is None or tool.function.name in chosen]
        names = frozenset(function.name for function in functions)
        if body.is_call_forced and len(functions) == 1:
            return ToolUse(tools, names, functions[0].parameters or NO_PARAMETERS, parallel, True, functions[0].name)
        if body.is_call_forced:
            return ToolUse(tools, names, _any_call_schema(functions), parallel, True, None)
        if isinstance(answer_form, str):
            raise InvalidRequest(
                "a grammar of the answer excludes tool calls: set tool_choice to none, or send a JSON schema",
                "tool_choice",
            )
        schema = None if answer_form is None else _any_call_schema(functions, answer_form)
        return ToolUse(tools, names, schema, parallel, False, None)

    @property
    def custom_names(self) -> frozenset[str]:
        """Names of the tools whose input is a text."""
        return frozenset(tool.function.name for tool in self.tools if isinstance(tool, CustomTool))

    @property
    def limit(self) -> int | None:
        """Calls to return."""
        return None if self.parallel else 1

    @property
    def parameters(self) -> Tools:
        """Schema of the parameters of each tool that may be called."""
        functions = (tool.function for tool in self.tools)
        return {
            function.name: function.parameters or NO_PARAMETERS
            for function in functions
            if function.name in self.callable_names
        }


def stops(format_: AnswerFormat, use: ToolUse | None) -> tuple[str, ...]:
    """Texts that end the answer of a request that wants one call at most."""
    is_one = use is not None and not use.parallel and not use.is_forced
    return (format_.calls.call_end,) if is_one and format_.calls.call_end else ()


def answer_parser(format_: AnswerFormat, use: ToolUse | None, prompt_end: str, is_constrained: bool) -> AnswerParser:
    """A new parser; every choice needs its own. A grammar begins with the first token, so that a constrained answer has neither
    reasoning nor the markers of calls."""
    if use is not None and use.forced is not None:
        return ForcedCallParser(use.forced, format_.calls.new_id)
    if use is not None and use.is_forced:
        return ForcedChoiceParser(use.parameters, format_.calls.new_id)
    if is_constrained:
        return TextParser() if use is None else format_.calls.parser(use.parameters, use.limit)
    return format_.parser(prompt_end, None if use is None else use.parameters, None if use is None else use.limit)


def _any_call_schema(functions: Sequence[Function], answer: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A call of one of the functions, or the answer."""
    schemas = [_call_schema(function, f"#/anyOf/{i}") for i, function in enumerate(functions)]
    if answer is not None:
        schemas.append(_move_refs(answer, f"#/anyOf/{len(schemas)}"))
    return {"anyOf": schemas}


def _call_schema(function: Function, position: str) -> dict[str, Any]:
    parameters = _move_refs(function.parameters or NO_PARAMETERS, f"{position}/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _move_refs(schema: Any, root: str) -> Any:
    """`schema` with its internal references rewritten for its new position `root`."""
    if isinstance(schema, Mapping):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and value[:1] == "#"
            else _move_refs(value, root)
            for key, value in schema.items()
        }
    return [_move_refs(item, root) for item in schema] if isinstance(schema, list) else schema
