"""Bodies of Ollama's API: POST /api/chat, /api/generate and /api/show."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from paceline.gateway.api.bodies import MAX_SEED, MAX_TOKENS, inconsistent
from paceline.gateway.api.messages import MAX_CALLS, MAX_MESSAGES, Item, Tools
from paceline.gateway.api.translated import (
    THINKING_VARIABLES,
    Conversation,
    TranslatedBody,
    function_call,
    schema_format,
)

OPTIONS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "stop": "stop",
}
"""Options with an effect, and the parameters with the same meaning. Others are ignored, as any name may be sent."""


class _Images(Item):
    @model_validator(mode="before")
    @classmethod
    def _reject_images(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("images"):
            raise inconsistent("images", "images are not supported: the model reads text only")
        return values


class OllamaFunction(Item):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaCall(Item):
    id: str | None = None
    function: OllamaFunction


class OllamaMessage(_Images):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], Field(fail_fast=True, max_length=MAX_CALLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaBody(TranslatedBody):
    """What /api/chat and /api/generate share."""

    ignored = frozenset({"keep_alive", "template", "context", "logprobs", "top_logprobs", "truncate", "shift"})

    model: str
    stream: bool = True
    format: dict[str, Any] | str | None = None
    """A JSON schema, or `json`."""
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    """Whether the model reasons before its answer, or how much. Without it the chat template decides."""

    @model_validator(mode="after")
    def _check_format(self) -> "OllamaBody":
        if isinstance(self.format, str) and self.format not in ("", "json"):
            raise inconsistent("format", 'format must be "json" or a JSON schema')
        return self

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether the request only asks for the model to be loaded, as it is."""

    @property
    def shared_values(self) -> dict[str, Any]:
        """The fields of a chat or completion request that have the same meaning."""
        given = self.options or {}
        values = {name: given[option] for option, name in OPTIONS.items() if given.get(option) is not None}
        if values.get("stop") in ("", []):
            del values["stop"]
        seed, limit = given.get("seed"), given.get("num_predict")
        if isinstance(seed, int) and seed >= 0:  # a negative one means a random one
            values["seed"] = min(seed, MAX_SEED)
        if isinstance(limit, int) and limit > 0:  # -1 and -2 mean no limit
            values["max_tokens"] = min(limit, MAX_TOKENS)
        if isinstance(self.format, Mapping):
            values["response_format"] = schema_format("answer", self.format)
        elif self.format:
            values["response_format"] = {"type": "json_object"}
        return {"model": self.model, "stream": self.stream, **values}

    @property
    def thinking_values(self) -> dict[str, Any]:
        if self.think is None:
            return {}
        variables = dict.fromkeys(THINKING_VARIABLES, bool(self.think))
        effort = {"reasoning_effort": self.think} if isinstance(self.think, str) else {}
        return {"chat_template_kwargs": variables, **effort}


class OllamaChatBody(OllamaBody):
    """Body of POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True, max_length=MAX_MESSAGES)] = Field(
        default_factory=list
    )
    tools: Tools | None = None

    @property
    def is_empty(self) -> bool:
        return not self.messages

    def chat_values(self) -> dict[str, Any]:
        conversation = Conversation()
        open_calls: list[tuple[str, str]] = []
        """Ids and names of calls without a result."""
        for number, message in enumerate(self.messages):
            if message.role == "assistant":
                open_calls += _add_answer(conversation, message, number)
            elif message.role == "tool":
                call_id = message.tool_call_id or _take_call(open_calls, message.tool_name)
                conversation.add("tool", message.content, tool_call_id=call_id)
            else:
                conversation.add(message.role, message.content)
        tools = None if self.tools is None else [tool.model_dump() for tool in self.tools]
        return {**self.shared_values, **self.thinking_values, "messages": conversation.messages, "tools": tools}


class OllamaGenerateBody(OllamaBody, _Images):
    """Body of POST /api/generate: one message of the user, or with `raw` a text that is continued."""

    prompt: str = ""
    suffix: str | None = None
    """Text after the one to generate."""
    system: str | None = None
    raw: bool = False
    images: list[str] | None = None
    """Always empty: images are not supported."""

    @property
    def is_empty(self) -> bool:
        return not self.prompt

    @property
    def is_text(self) -> bool:
        """Whether the prompt is a text that is continued."""
        return self.raw or bool(self.suffix)

    def chat_values(self) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": self.prompt}]
        return {**self.shared_values, **self.thinking_values, "messages": messages}


class OllamaShowBody(Item):
    """Body of POST /api/show."""

    model: str | None = None
    name: str | None = None
    """The same as `model`, under its older name."""


def _add_answer(conversation: Conversation, message: OllamaMessage, number: int) -> list[tuple[str, str]]:
    """Returns ids and names of the calls. Calls have no ids unless a library adds them."""
    conversation.add("assistant", message.content)
    if message.thinking:
        conversation.messages[-1]["reasoning"] = message.thinking
    calls = [
        (call.id or f"call_{number}_{index}", call.function) for index, call in enumerate(message.tool_calls or ())
    ]
    for call_id, function in calls:
        conversation.add_call(function_call(call_id, function.name, function.arguments))
    return [(call_id, function.name) for call_id, function in calls]


def _take_call(calls: list[tuple[str, str]], name: str | None) -> str:
    """The id of the first call without a result, of this tool if it has one."""
    call = next((call for call in calls if call[1] == name), calls[0] if calls else None)
    if call is None:
        return "call"
    calls.remove(call)
    return call[0]
