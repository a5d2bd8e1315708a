"""Messages, tools and tool calls of a conversation, as clients send them.

Unknown fields are ignored here: clients send back what a server, or a library between them, has added to a message. A field
with a wrong type is still an error.
"""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from paceline.gateway.api.bodies import Body

MAX_MESSAGES = 2048
MAX_PARTS = 4096
"""Parts of the content of one message."""
MAX_CALLS = 1024
"""Tool calls of one message."""
MAX_TOOLS = 128
NAME = r"^[A-Za-z0-9_-]{1,64}$"


class Item(Body):
    """A message, a part of one, a tool or a call. Unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore")


class TextPart(Item):
    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _reject_media(cls, values: Any) -> Any:
        kind = values.get("type") if isinstance(values, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise PydanticCustomError(
                "unsupported_content",
                "content of type {kind} is not supported: the model reads text only",
                {"kind": kind},
            )
        return values


Content = str | Annotated[list[TextPart], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS)]


class SystemMessage(Item):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Item):
    role: Literal["user"]
    content: Content
    name: str | None = None


class FunctionCall(Item):
    name: str
    arguments: str


class ToolCall(Item):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class CustomCall(Item):
    name: str
    input: str


class CustomToolCall(Item):
    id: str
    type: Literal["custom"]
    custom: CustomCall

    @property
    def function(self) -> FunctionCall:
        """The call as the model wrote it: of a function with one text argument."""
        return FunctionCall(name=self.custom.name, arguments=json.dumps({INPUT: self.custom.input}, ensure_ascii=False))


class AssistantMessage(Item):
    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    """The same as `reasoning`, under its older name."""
    tool_calls: Annotated[list[ToolCall | CustomToolCall], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None


class ToolMessage(Item):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


AnyMessage = SystemMessage | UserMessage | AssistantMessage | ToolMessage
Message = Annotated[AnyMessage, Field(discriminator="role")]
Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]

INPUT = "input"
"""The only parameter of the function that stands for a custom tool."""


class Function(Item):
    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; absent means no arguments."""
    strict: bool = False
    """The arguments of a forced call follow the schema in any case. Those of other calls are what the model writes."""


class Tool(Item):
    type: Literal["function"]
    function: Function


class CustomDescription(Item):
    name: str = Field(pattern=NAME)
    description: str | None = None
    format: dict[str, Any] | None = None
    """Not used: the input is text."""


class CustomTool(Item):
    """A tool whose input is a text."""

    type: Literal["custom"]
    custom: CustomDescription

    @property
    def function(self) -> Function:
        """The function that the model is offered in its place."""
        parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
        return Function(name=self.custom.name, description=self.custom.description, parameters=parameters)


AnyTool = Tool | CustomTool
Tools = Annotated[list[Annotated[AnyTool, Field(discriminator="type")]], Field(fail_fast=True, max_length=MAX_TOOLS)]


class ToolName(Item):
    name: str


class ToolChoice(Item):
    """One tool, which the model has to call."""

    type: Literal["function", "custom"]
    function: ToolName | None = None
    custom: ToolName | None = None

    @model_validator(mode="after")
    def _check(self) -> "ToolChoice":
        if getattr(self, self.type) is None:
            raise PydanticCustomError("missing_name", "{kind}.name is required", {"kind": self.type})
        return self

    @property
    def name(self) -> str:
        chosen: ToolName = getattr(self, self.type)
        return chosen.name


class AllowedTools(Item):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoice], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class AllowedChoice(Item):
    """Some of the tools, of which the model may or has to call one."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


def content_text(message: AnyMessage) -> str:
    """The message's content as one string."""
    content = message.content
    return "".join(part.text for part in content) if isinstance(content, list) else content or ""


def template_message(message: AnyMessage) -> dict[str, Any]:
    """The message as chat templates expect it: content as one string, role `system` for `developer`, reasoning under all names
    that templates read. gpt-oss calls it `thinking`, and refuses it if a message with calls has content too."""
    hidden = {"reasoning", "reasoning_content", "tool_calls"}
    values: dict[str, Any] = message.model_dump(exclude_none=True, exclude=hidden)
    if values["role"] == "developer":
        values["role"] = "system"
    values["content"] = content_text(message)
    if isinstance(message, AssistantMessage):
        reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
        if reasoning is not None:
            values |= {"reasoning": reasoning, "reasoning_content": reasoning}
            if not (message.tool_calls and values["content"]):
                values["thinking"] = reasoning
        if message.tool_calls:
            values["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.model_dump()}
                for call in message.tool_calls
            ]
    return values


def template_tools(tools: Sequence[AnyTool]) -> list[dict[str, Any]]:
    """The tools as chat templates expect them: functions without `strict`, which no template shows."""
    return [
        {"type": "function", "function": tool.function.model_dump(exclude_none=True, exclude={"strict"})}
        for tool in tools
    ]


def text_length(message: AnyMessage) -> int:
    """Characters of the message's content, and of the arguments of its tool calls."""
    content = message.content
    calls = message.tool_calls if isinstance(message, AssistantMessage) else None
    arguments = sum(len(call.function.arguments) for call in calls or ())
    return arguments + (sum(len(part.text) for part in content) if isinstance(content, list) else len(content or ""))


def conversation_length(messages: Sequence[AnyMessage], tools: Sequence[AnyTool]) -> int:
    """Characters of the conversation and of its tools. The rendered text has at least as many."""
    return sum(text_length(message) for message in messages) + sum(_value_length(tool.function) for tool in tools)


def _value_length(value: Any) -> int:
    """Characters of all texts in a value, names included."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Function):
        return _value_length((value.name, value.description, value.parameters))
    if isinstance(value, dict):
        return sum(len(name) + _value_length(item) for name, item in value.items())
    return sum(map(_value_length, value)) if isinstance(value, list | tuple) else 0


def last_user_text(messages: Sequence[AnyMessage]) -> str:
    """Content of the last user message, or of the last message if no user message exists."""
    message = next((message for message in reversed(messages) if message.role == "user"), messages[-1])
    return content_text(message)
