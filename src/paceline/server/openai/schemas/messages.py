"""Messages of a conversation, as the caller sends them."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from paceline.server.openai.schemas.body import Body, Refusals


class TextPart(Body):
    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, values: Any) -> Any:
        kind = values.get("type") if isinstance(values, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise PydanticCustomError(
                "unsupported_content", "content of type {kind} is not supported: this model reads text", {"kind": kind}
            )
        return values


Content = str | Annotated[list[TextPart], Field(min_length=1)]


class SystemMessage(Body):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Body):
    role: Literal["user"]
    content: Content
    name: str | None = None


class CalledFunction(Body):
    name: str
    arguments: str


class CalledTool(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class AssistantMessage(Body):
    # What a response carries may come back as it was
    refused: ClassVar[Refusals] = {"annotations": (([],), "answers carry none"), "refusal": ((), "answers carry none")}

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[CalledTool], Field(min_length=1)] | None = None


class ToolMessage(Body):
    role: Literal["tool"]
    content: Content
    tool_call_id: str


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


def plain(message: SystemMessage | UserMessage | AssistantMessage | ToolMessage) -> dict[str, Any]:
    """As chat templates expect it: text in one piece, system for developer."""
    values: dict[str, Any] = message.model_dump(exclude_none=True)
    if values["role"] == "developer":
        values["role"] = "system"
    content = message.content
    values["content"] = "".join(part.text for part in content) if isinstance(content, list) else content or ""
    return values


def last_words(messages: Sequence[Message]) -> str:
    """What the user said last: that is what the answer will be about."""
    said = next((message for message in reversed(messages) if message.role == "user"), messages[-1])
    content: str = plain(said)["content"]
    return content
