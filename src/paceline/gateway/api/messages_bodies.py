"""Body of POST /v1/messages: Anthropic's Messages API.

Unknown fields of messages, their parts and tools are ignored, as agents add new ones with every version.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from paceline.gateway.api.bodies import (
    MAX_SEED,
    MAX_STOPS,
    MAX_TOKENS,
    SpeculationOptions,
    Stop,
    StreamOptions,
)
from paceline.gateway.api.messages import MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, Item
from paceline.gateway.api.translated import (
    THINKING_VARIABLES,
    Conversation,
    TranslatedBody,
    function_call,
    function_tool,
    joined,
    schema_format,
)

BILLING_HEADER = "x-anthropic-billing-header:"
"""Start of a part of Claude Code's system prompt that is not for the model, and differs from run to run."""
READ_PARTS = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result", "tool_reference")
EFFORTS = {"xhigh": "high", "max": "high"}
"""Efforts that chat templates do not know."""


class ClaudePart(Item):
    """A part of a message. Its type says which fields it has."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)
    tool_use_id: str = ""
    tool_name: str = ""
    content: "str | Annotated[list[ClaudePart], Field(fail_fast=True, max_length=MAX_PARTS)]" = ""

    @model_validator(mode="before")
    @classmethod
    def _reject_others(cls, values: Any) -> Any:
        kind = values.get("type") if isinstance(values, dict) else None
        if isinstance(kind, str) and kind not in READ_PARTS:
            raise PydanticCustomError(
                "unsupported_content",
                "content of type {kind} is not supported: the model reads text only",
                {"kind": kind},
            )
        return values


ClaudeContent = str | Annotated[list[ClaudePart], Field(fail_fast=True, max_length=MAX_PARTS)]


class ClaudeMessage(Item):
    role: Literal["user", "assistant", "system"]
    content: ClaudeContent = ""

    @property
    def parts(self) -> Sequence[ClaudePart]:
        return _parts(self.content)


class ClaudeTool(Item):
    name: str = Field(max_length=128)
    type: str = "custom"
    """Other types are tools of Anthropic's servers, and tools whose schema its models know. They are left out."""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool = False
    """Whether the model sees the tool only after a result has named it."""


class ClaudeToolChoice(Item):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class ClaudeThinking(Item):
    type: Literal["enabled", "disabled", "adaptive"]


class ClaudeFormat(Item):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class ClaudeOutput(Item):
    format: ClaudeFormat | None = None
    effort: str | None = Field(None, max_length=32)


class MessagesBody(TranslatedBody):
    """Body of POST /v1/messages and /v1/messages/count_tokens."""

    ignored = frozenset(
        {
            *("cache_control", "container", "context_management", "inference_geo", "mcp_servers", "metadata"),
            *("safeguards", "service_tier", "speed", "betas"),
        }
    )

    model: str | None = None
    messages: Annotated[list[ClaudeMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    """With a last message of the assistant, the answer continues it."""
    system: ClaudeContent | None = None
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    stream: bool = False
    stream_options: StreamOptions | None = None
    """Only `resumable` has an effect."""
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    temperature: float | None = Field(None, ge=0, le=10)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    tools: Annotated[list[ClaudeTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: ClaudeToolChoice | None = None
    thinking: ClaudeThinking | None = None
    """Without it, and with type `disabled`, the chat template turns reasoning off if it can."""
    output_config: ClaudeOutput | None = None

    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    cache_salt: str | None = Field(None, max_length=256)
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    timeout: float | None = Field(None, gt=0, le=86400)
    speculation: SpeculationOptions | None = None

    def chat_values(self) -> dict[str, Any]:
        """The fields of the chat request with the same meaning."""
        conversation = Conversation()
        system = [text for text in _texts(self.system or "") if not text.startswith(BILLING_HEADER)]
        if system:
            conversation.add("system", joined(system))
        for message in self.messages:
            if message.role == "assistant":
                _add_answer(conversation, message.parts)
            else:
                _add_input(conversation, message.role, message.parts)
        choice, output = self.tool_choice, self.output_config or ClaudeOutput(effort=None)
        is_thinking = self.thinking is not None and self.thinking.type != "disabled"
        last = self.messages[-1]
        is_prefilled = last.role == "assistant" and not any(part.type == "tool_use" for part in last.parts)
        same = (
            "model",
            "max_tokens",
            "stream",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "priority",
            "timeout",
        )
        return {
            **{name: getattr(self, name) for name in same},
            "messages": conversation.messages,
            "continue_final_message": is_prefilled and len(conversation.messages) > 1,
            "stop": self.stop_sequences or None,
            "tools": None if self.tools is None else [_chat_tool(tool) for tool in self._shown_tools()],
            "tool_choice": None if choice is None else _chat_choice(choice),
            "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
            "response_format": output.format and schema_format("answer", output.format.schema_),
            "reasoning_effort": EFFORTS.get(output.effort or "", output.effort),
            "chat_template_kwargs": {} if is_thinking else dict.fromkeys(THINKING_VARIABLES, False),
            "cache_salt": self.cache_salt,
            "stream_options": self.stream_options and self.stream_options.model_dump(),
            "speculation": self.speculation and self.speculation.model_dump(exclude_unset=True),
        }

    def _shown_tools(self) -> Iterator[ClaudeTool]:
        named = {part.tool_name for message in self.messages for part in _references(message.parts)}
        for tool in self.tools or ():
            if tool.type == "custom" and (not tool.defer_loading or tool.name in named):
                yield tool


def _parts(content: ClaudeContent) -> Sequence[ClaudePart]:
    return [ClaudePart(type="text", text=content)] if isinstance(content, str) else content


def _texts(content: ClaudeContent) -> list[str]:
    """The texts of the parts, and the names of tools that they refer to."""
    return [part.text or part.tool_name for part in _parts(content)]


def _references(parts: Iterable[ClaudePart]) -> Iterator[ClaudePart]:
    for part in parts:
        yield from (inner for inner in _parts(part.content) if inner.type == "tool_reference")


def _add_input(conversation: Conversation, role: str, parts: Sequence[ClaudePart]) -> None:
    """Texts in a row are one message; a result of a tool is one of its own."""
    texts: list[str] = []
    for part in parts:
        if part.type != "tool_result":
            texts.append(part.text)
            continue
        if texts:
            conversation.add(role, joined(texts))
            texts = []
        conversation.add("tool", joined(_texts(part.content)), tool_call_id=part.tool_use_id)
    if texts or not parts:
        conversation.add(role, joined(texts))


def _add_answer(conversation: Conversation, parts: Sequence[ClaudePart]) -> None:
    conversation.add("assistant", "")
    for part in parts:
        if part.type == "text":
            conversation.add_text(part.text)
        elif part.type == "thinking":
            conversation.add_reasoning(part.thinking)
        elif part.type == "tool_use":
            conversation.add_call(function_call(part.id, part.name, json.dumps(part.input, ensure_ascii=False)))


def _chat_tool(tool: ClaudeTool) -> dict[str, Any]:
    return function_tool(tool.name, tool.description, tool.input_schema, bool(tool.strict))


def _chat_choice(choice: ClaudeToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"any": "required"}.get(choice.type, choice.type)
