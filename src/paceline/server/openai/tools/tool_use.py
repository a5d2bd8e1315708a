"""What a request's `tools` and `tool_choice` mean: for the prompt, for the grammar, and for reading the answer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.server.openai.schemas.chat import ChatBody, Function, Tool, ToolChoice
from paceline.server.openai.tools.tool_calls import CLOSE, CallReader, ForcedCall, ForcedChoice, FreeCalls

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """`json_schema` is not None when a call is forced."""

    tools: tuple[Tool, ...]
    json_schema: Mapping[str, Any] | None
    stops: tuple[str, ...]
    parallel: bool
    forced: str | None
    """The one tool that can be called, if it is known before."""

    @staticmethod
    def of(body: ChatBody) -> "ToolUse | None":
        """None: the request has no tools, or wants none of them called."""
        if not body.tools or body.tool_choice == "none":
            return None
        functions = [tool.function for tool in body.tools]
        tools, choice, parallel = tuple(body.tools), body.tool_choice, body.parallel_tool_calls
        if isinstance(choice, ToolChoice):
            functions = [function for function in functions if function.name == choice.function.name]
        if choice in (None, "auto"):
            return ToolUse(tools, None, () if parallel else (CLOSE,), parallel, None)
        if len(functions) == 1:
            return ToolUse(tools, functions[0].parameters or NO_PARAMETERS, (), parallel, functions[0].name)
        return ToolUse(tools, _any_call(functions), (), parallel, None)

    def reader(self) -> CallReader:
        """A fresh one for each choice."""
        if self.forced is not None:
            return ForcedCall(self.forced)
        if self.json_schema is not None:
            return ForcedChoice()
        return FreeCalls({tool.function.name for tool in self.tools}, None if self.parallel else 1)


def _any_call(functions: list[Function]) -> dict[str, Any]:
    return {"anyOf": [_one_call(function, f"#/anyOf/{i}") for i, function in enumerate(functions)]}


def _one_call(function: Function, where: str) -> dict[str, Any]:
    parameters = _moved(function.parameters or NO_PARAMETERS, f"{where}/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": parameters},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """`schema` with its references into itself pointing to where it now stands."""
    if isinstance(schema, Mapping):
        return {
            key: root + value[1:]
            if key == "$ref" and isinstance(value, str) and value[:1] == "#"
            else _moved(value, root)
            for key, value in schema.items()
        }
    return [_moved(item, root) for item in schema] if isinstance(schema, list) else schema


def as_template_tools(tools: tuple[Tool, ...]) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]


HERMES_PROMPT = """\
You may call one or more functions to help with the user's request. Their signatures are between <tools></tools>:
<tools>
{tools}
</tools>
For each call write a JSON object with the function's name and arguments between <tool_call></tool_call>:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""


def spell_out(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools and calls as text, the way Hermes models write them, for a chat template that knows of neither."""
    spelled = [_spelled(message) for message in messages]
    if not tools:
        return spelled
    prompt = HERMES_PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if spelled[0]["role"] == "system":
        return [{"role": "system", "content": f"{spelled[0]['content']}\n\n{prompt}"}, *spelled[1:]]
    return [{"role": "system", "content": prompt}, *spelled]


def _spelled(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = "\n".join(
        f'<tool_call>\n{{"name": {json.dumps(call["function"]["name"])}, "arguments": {call["function"]["arguments"]}}}\n'
        "</tool_call>"
        for call in message.get("tool_calls", ())
    )
    content = "\n".join(part for part in (message["content"], calls) if part)
    return {"role": message["role"], "content": content}
