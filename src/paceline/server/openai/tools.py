"""How a request uses tools: their place in the prompt, the grammar of a forced call, and the parser of the output."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.server.openai.schemas.chat import ChatBody, Function, Tool, ToolChoice
from paceline.server.openai.tool_calls import (
    CLOSE_TAG,
    AutoCallParser,
    ForcedCallParser,
    ForcedChoiceParser,
    ToolCallParser,
)

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How a request uses tools: their place in the prompt, the grammar and the parser of the output."""

    tools: tuple[Tool, ...]
    json_schema: Mapping[str, Any] | None
    """Schema of the output if a call is forced, otherwise None."""
    stops: tuple[str, ...]
    parallel: bool
    forced: str | None
    """Name of the forced tool; None if the model selects one."""

    @staticmethod
    def from_body(body: ChatBody) -> "ToolUse | None":
        """None if the request has no tools or sets `tool_choice: none`."""
        if not body.tools or body.tool_choice == "none":
            return None
        functions = [tool.function for tool in body.tools]
        tools, choice, parallel = tuple(body.tools), body.tool_choice, body.parallel_tool_calls
        if isinstance(choice, ToolChoice):
            functions = [function for function in functions if function.name == choice.function.name]
        if choice in (None, "auto"):
            return ToolUse(tools, None, () if parallel else (CLOSE_TAG,), parallel, None)
        if len(functions) == 1:
            return ToolUse(tools, functions[0].parameters or NO_PARAMETERS, (), parallel, functions[0].name)
        return ToolUse(tools, _any_call_schema(functions), (), parallel, None)

    def parser(self) -> ToolCallParser:
        """A new parser; every choice needs its own."""
        if self.forced is not None:
            return ForcedCallParser(self.forced)
        if self.json_schema is not None:
            return ForcedChoiceParser()
        return AutoCallParser({tool.function.name for tool in self.tools}, None if self.parallel else 1)


def _any_call_schema(functions: list[Function]) -> dict[str, Any]:
    return {"anyOf": [_call_schema(function, f"#/anyOf/{i}") for i, function in enumerate(functions)]}


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
