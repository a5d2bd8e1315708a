"""Bodies of chat requests: messages, tools and POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from paceline.server.openai.schemas.body import (
    IGNORED_PARAMS,
    MAX_TOKENS,
    UNSUPPORTED_PARAMS,
    Body,
    GenerationBody,
    TextFormat,
    UnsupportedParams,
    inconsistent,
)

MAX_MESSAGES = 2048
MAX_PARTS = 4096
"""Parts of the content of one message."""
MAX_CALLS = 1024
"""Tool calls of one message."""
NAME = r"^[A-Za-z0-9_-]{1,64}$"
RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})
"""Variables of a chat template that have a parameter of their own."""


class TextPart(Body):
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


class SystemMessage(Body):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Body):
    role: Literal["user"]
    content: Content
    name: str | None = None


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    ignored = frozenset({"index"})  # a client that joins the chunks of a stream may send it back

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AssistantMessage(Body):
    # A client may send back a message as the server returned it
    unsupported: ClassVar[UnsupportedParams] = {
        "annotations": (([],), "responses have none"),
        "refusal": ((), "responses have none"),
    }

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, min_length=1, max_length=MAX_CALLS)] | None = None


class ToolMessage(Body):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


def template_message(message: SystemMessage | UserMessage | AssistantMessage | ToolMessage) -> dict[str, Any]:
    """The message as chat templates expect it: content as one string, role `system` for `developer`."""
    values: dict[str, Any] = message.model_dump(exclude_none=True)
    if values["role"] == "developer":
        values["role"] = "system"
    content = message.content
    values["content"] = "".join(part.text for part in content) if isinstance(content, list) else content or ""
    return values


def text_length(message: SystemMessage | UserMessage | AssistantMessage | ToolMessage) -> int:
    """Characters of the message's content and of the arguments of its tool calls."""
    content = message.content
    calls = message.tool_calls if isinstance(message, AssistantMessage) else None
    arguments = sum(len(call.function.arguments) for call in calls or ())
    return arguments + (sum(len(part.text) for part in content) if isinstance(content, list) else len(content or ""))


def conversation_length(messages: Sequence[Message], tools: "Sequence[Tool]") -> int:
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


def last_user_text(messages: Sequence[Message]) -> str:
    """Content of the last user message, or of the last message if no user message exists."""
    message = next((message for message in reversed(messages) if message.role == "user"), messages[-1])
    content: str = template_message(message)["content"]
    return content


class Function(Body):
    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; absent means no arguments."""
    strict: bool = False


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class ToolChoice(Body):
    type: Literal["function"]
    function: FunctionName


class ChatBody(GenerationBody):
    """Body of POST /v1/chat/completions."""

    unsupported: ClassVar[UnsupportedParams] = {
        **UNSUPPORTED_PARAMS,
        "functions": (([],), "use `tools`"),
        "function_call": (("none",), "use `tool_choice`"),
        "audio": ((), "the model writes text only"),
        "modalities": ((["text"],), "the model writes text only"),
        "reasoning_effort": ((), "the model has no such setting"),
        "verbosity": ((), "the model has no such setting"),
        "web_search_options": ((), "pass a search tool in `tools`"),
        "echo": ((False,), "prepend the last message in the client"),
        "add_special_tokens": ((False,), "the chat template adds the special tokens"),
        "documents": (([],), "put them into a message"),
        "continue_final_message": ((False,), "render the messages in the client and use /v1/completions"),
        "chat_template": ((), "render the messages in the client and use /v1/completions"),
    }

    ignored = IGNORED_PARAMS | {"prediction"}

    messages: Messages
    add_generation_prompt: bool = True
    """Whether the prompt ends with the start of the assistant's message."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the model's chat template."""
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    """Output tokens; without this and `max_tokens` the limit is the model's context window."""
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _check(self) -> "ChatBody":
        names = [tool.function.name for tool in self.tools or ()]
        choice, is_forced = self.tool_choice, self.tool_choice == "required" or isinstance(self.tool_choice, ToolChoice)
        can_call = bool(names) and choice != "none"
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise inconsistent("max_tokens", "max_tokens and max_completion_tokens differ: send one of them")
        if (self.chat_template_kwargs or {}).keys() & RESERVED_VARIABLES:
            raise inconsistent(
                "chat_template_kwargs", f"chat_template_kwargs cannot set {', '.join(sorted(RESERVED_VARIABLES))}"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise inconsistent("top_logprobs", "top_logprobs needs logprobs: true")
        if len(set(names)) < len(names):
            raise inconsistent("tools", "two tools have the same name: rename one")
        if is_forced and not names:
            raise inconsistent("tool_choice", "tool_choice needs tools")
        if isinstance(choice, ToolChoice) and choice.function.name not in names:
            raise inconsistent("tool_choice", f"tools has no function {choice.function.name!r}")
        if can_call and self.response_format is not None and not isinstance(self.response_format, TextFormat):
            raise inconsistent("response_format", "response_format excludes tool calls: set tool_choice to none")
        if can_call and not is_forced and any(tool.function.strict for tool in self.tools or ()):
            raise inconsistent("tools", "strict needs a forced call: set tool_choice to required or to a function")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens
