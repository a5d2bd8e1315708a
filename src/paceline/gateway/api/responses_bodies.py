"""Body of POST /v1/responses: OpenAI's Responses API.

Unknown fields of items, their parts and tools are ignored, as those of messages are.
"""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from paceline.gateway.api.bodies import (
    MAX_METADATA,
    MAX_SEED,
    MAX_TOKENS,
    JsonObjectFormat,
    SpeculationOptions,
    StreamOptions,
    TextFormat,
    UnsupportedParams,
    at_most,
)
from paceline.gateway.api.messages import INPUT, MAX_MESSAGES, MAX_PARTS, MAX_TOOLS, NAME, Item
from paceline.gateway.api.translated import Conversation, TranslatedBody, function_call, function_tool, schema_format

SEALED = "paceline:"
"""Start of reasoning that a client gets in `encrypted_content`. It is the text itself: only the client reads it."""
HOSTED_TOOLS = (
    *("apply_patch", "code_interpreter", "computer", "file_search", "image_generation", "local_shell", "mcp"),
    *("namespace", "programmatic_tool_calling", "shell", "tool_search", "web_search"),
)
"""Tools that OpenAI's own servers run, and groups of tools. They are left out; some agents always send them."""


class InputPart(Item):
    type: Literal["input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text"]
    text: str = ""
    refusal: str = ""

    @model_validator(mode="before")
    @classmethod
    def _reject_media(cls, values: Any) -> Any:
        kind = values.get("type") if isinstance(values, dict) else None
        if kind in ("input_image", "input_file", "input_audio"):
            raise PydanticCustomError(
                "unsupported_content",
                "content of type {kind} is not supported: the model reads text only",
                {"kind": kind},
            )
        return values


InputContent = str | Annotated[list[InputPart], Field(fail_fast=True, max_length=MAX_PARTS)]


class InputMessage(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: InputContent = ""


class InputCall(Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputCustomCall(Item):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str


class InputCallOutput(Item):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: InputContent


class InputReasoning(Item):
    type: Literal["reasoning"]
    summary: Annotated[list[InputPart], Field(fail_fast=True, max_length=MAX_PARTS)] = Field(default_factory=list)
    content: InputContent | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        """The reasoning. The client may have kept any of the three forms."""
        return _opened(self.encrypted_content) or text_of(self.content or "") or text_of(self.summary)


class ItemReference(Item):
    """An item of an earlier answer."""

    type: Literal["item_reference"]
    id: str


InputItem = InputMessage | InputCall | InputCustomCall | InputCallOutput | InputReasoning | ItemReference


def _with_type(values: Any) -> Any:
    """A message may come without its type."""
    return {"type": "message", **values} if isinstance(values, dict) and "role" in values else values


class ResponsesTool(Item):
    type: str
    name: str = Field("", max_length=128)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> "ResponsesTool":
        if self.type not in ("function", "custom") and not self.is_hosted:
            raise PydanticCustomError(
                "unsupported_tool", "tools of type {kind} are not supported: send functions", {"kind": self.type}
            )
        return self

    @property
    def is_hosted(self) -> bool:
        return self.type.startswith(HOSTED_TOOLS)


class ChosenTool(Item):
    type: Literal["function", "custom"]
    name: str = Field(pattern=NAME)


class AllowedToolChoice(Item):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(fail_fast=True, min_length=1, max_length=MAX_TOOLS)]


class ResponsesSchemaFormat(Item):
    type: Literal["json_schema"]
    name: str = Field(pattern=NAME)
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class TextOptions(Item):
    format: Annotated[TextFormat | JsonObjectFormat | ResponsesSchemaFormat, Field(discriminator="type")] | None = None


class ReasoningOptions(Item):
    effort: str | None = Field(None, max_length=32)
    summary: str | None = Field(None, max_length=32)
    """Whether the reasoning is the summary of its item. Without it, it is the content."""


class ResponsesBody(TranslatedBody):
    """Body of POST /v1/responses."""

    unsupported: ClassVar[UnsupportedParams] = {
        "background": ((False,), "stream the response"),
        "conversation": ((), "use `previous_response_id`"),
        "prompt": ((), "send the prompt in `input`"),
    }
    ignored = frozenset(
        {
            *("include_obfuscation", "max_tool_calls", "prompt_cache_retention", "service_tier", "top_logprobs"),
            *("client_metadata", "context_management", "truncation"),
        }
    )

    model: str | None = None
    input: (
        str
        | Annotated[
            list[Annotated[InputItem, Field(discriminator="type")]], Field(fail_fast=True, max_length=MAX_MESSAGES)
        ]
    ) = ""
    instructions: str | None = None
    """System message of this response alone: it is not kept for `previous_response_id`."""
    previous_response_id: str | None = Field(None, max_length=128)
    store: bool = True
    """Whether the server keeps the response, for `previous_response_id`."""
    include: Annotated[list[str], Field(max_length=64)] | None = None
    """`reasoning.encrypted_content` is the only one with an effect."""
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    temperature: float | None = Field(None, ge=0, le=10)
    top_p: float | None = Field(None, gt=0, le=1)
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | AllowedToolChoice | None = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Annotated[dict[str, str], at_most(MAX_METADATA)] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    top_k: int | None = Field(None, ge=-1, le=MAX_TOKENS)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    cache_salt: str | None = Field(None, max_length=256)
    priority: int = Field(0, ge=-(2**31), le=2**31 - 1)
    timeout: float | None = Field(None, gt=0, le=86400)
    speculation: SpeculationOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _type_messages(cls, values: Any) -> Any:
        items = values.get("input") if isinstance(values, dict) else None
        return {**values, "input": [_with_type(item) for item in items]} if isinstance(items, list) else values

    @property
    def items(self) -> Sequence[InputItem]:
        """The items of `input`, with a text as a message."""
        return [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    @property
    def is_sealed(self) -> bool:
        """Whether the client keeps the reasoning, to send it back."""
        return "reasoning.encrypted_content" in (self.include or ())

    def with_items(self, items: Sequence[InputItem]) -> Self:
        """The body with other items: those of the response that it continues, and none by reference."""
        return self.model_copy(update={"input": list(items)})

    def chat_values(self) -> dict[str, Any]:
        """The fields of the chat request with the same meaning. References to items are left out."""
        conversation = Conversation()
        if self.instructions:
            conversation.add("system", self.instructions)
        for item in self.items:
            _add_item(conversation, item)
        if self.tools is not None:
            tools = [_chat_tool(tool) for tool in self.tools if not tool.is_hosted]
        else:
            tools = None
        same = (
            *("model", "stream", "temperature", "top_p", "parallel_tool_calls", "metadata"),
            *("top_k", "min_p", "seed", "cache_salt", "priority", "timeout"),
        )
        return {
            **{name: getattr(self, name) for name in same},
            "messages": conversation.messages,
            "max_completion_tokens": self.max_output_tokens,
            "tools": tools,
            "tool_choice": _chat_choice(self.tool_choice),
            "response_format": _chat_format(self.text.format if self.text is not None else None),
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            "stream_options": self.stream_options and self.stream_options.model_dump(),
            "speculation": self.speculation and self.speculation.model_dump(exclude_unset=True),
        }


def text_of(content: str | Sequence[InputPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text or part.refusal for part in content)


def sealed(reasoning: str) -> str:
    """The reasoning as `encrypted_content`, which clients send back as it is."""
    return base64.b64encode(f"{SEALED}{reasoning}".encode()).decode()


def _opened(text: str | None) -> str:
    """The reasoning in what `sealed` returned; empty for another text."""
    try:
        opened = base64.b64decode(text or "", validate=True).decode()
    except ValueError:
        return ""
    return opened.removeprefix(SEALED) if opened.startswith(SEALED) else ""


def _add_item(conversation: Conversation, item: InputItem) -> None:
    if isinstance(item, InputMessage) and item.role == "assistant":
        conversation.add_text(text_of(item.content))
    elif isinstance(item, InputMessage):
        conversation.add(item.role, text_of(item.content))
    elif isinstance(item, InputReasoning):
        conversation.add_reasoning(item.text)
    elif isinstance(item, InputCall):
        conversation.add_call(function_call(item.call_id, item.name, item.arguments))
    elif isinstance(item, InputCustomCall):
        conversation.add_call(function_call(item.call_id, item.name, {INPUT: item.input}))
    elif isinstance(item, InputCallOutput):
        conversation.add("tool", text_of(item.output), tool_call_id=item.call_id)


def _chat_tool(tool: ResponsesTool) -> dict[str, Any]:
    if tool.type == "custom":
        return {"type": "custom", "custom": {"name": tool.name, "description": tool.description}}
    return function_tool(tool.name, tool.description, tool.parameters, bool(tool.strict))


def _chat_choice(choice: str | ChosenTool | AllowedToolChoice | None) -> Any:
    if isinstance(choice, ChosenTool):
        return {"type": choice.type, choice.type: {"name": choice.name}}
    if isinstance(choice, AllowedToolChoice):
        allowed = [_chat_choice(tool) for tool in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": allowed}}
    return choice


def _chat_format(form: TextFormat | JsonObjectFormat | ResponsesSchemaFormat | None) -> dict[str, Any] | None:
    if isinstance(form, ResponsesSchemaFormat):
        return schema_format(form.name, form.schema_)
    return None if form is None else form.model_dump()
