"""POST /v1/chat/completions."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from paceline.server.openai.schemas.body import Body, Refusals
from paceline.server.openai.schemas.generation import MAX_TOKENS, REFUSED_EVERYWHERE, GenerationBody, Text
from paceline.server.openai.schemas.messages import Message

NAME = r"^[A-Za-z0-9_-]{1,64}$"


class Function(Body):
    name: str = Field(pattern=NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema; absent: no parameters."""
    strict: bool = False


class Tool(Body):
    type: Literal["function"]
    function: Function


class ChosenFunction(Body):
    name: str


class ToolChoice(Body):
    type: Literal["function"]
    function: ChosenFunction


class ChatBody(GenerationBody):
    refused: ClassVar[Refusals] = {
        **REFUSED_EVERYWHERE,
        "functions": (([],), "use `tools`"),
        "function_call": (("none",), "use `tool_choice`"),
        "audio": ((), "this model writes text"),
        "modalities": ((["text"],), "this model writes text"),
        "prediction": ((), "drafts are made here; use `speculation`"),
        "reasoning_effort": ((), "the model has no such setting"),
        "verbosity": ((), "the model has no such setting"),
        "web_search_options": ((), "give a search tool in `tools`"),
        "echo": ((False,), "put the last message in front yourself"),
        "add_generation_prompt": ((True,), "the model always answers"),
        "continue_final_message": ((False,), "render the conversation yourself and use /v1/completions"),
        "chat_template": ((), "render the conversation yourself and use /v1/completions"),
    }

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    """Neither this nor `max_tokens`: as many as the model's window has room for."""
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="after")
    def _consistent(self) -> "ChatBody":
        names = [tool.function.name for tool in self.tools or ()]
        choice, forced = self.tool_choice, self.tool_choice == "required" or isinstance(self.tool_choice, ToolChoice)
        wanted = bool(names) and choice != "none"
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise _wrong("max_tokens", "max_tokens is the old name of max_completion_tokens: give one of them")
        if self.top_logprobs is not None and not self.logprobs:
            raise _wrong("top_logprobs", "top_logprobs needs logprobs: true")
        if len(set(names)) < len(names):
            raise _wrong("tools", "two tools have the same name")
        if forced and not names:
            raise _wrong("tool_choice", "tool_choice needs tools")
        if isinstance(choice, ToolChoice) and choice.function.name not in names:
            raise _wrong("tool_choice", f"there is no tool {choice.function.name!r}")
        if wanted and self.response_format is not None and not isinstance(self.response_format, Text):
            raise _wrong("response_format", "a response_format leaves no room for calls: set tool_choice to none")
        if wanted and not forced and any(tool.function.strict for tool in self.tools or ()):
            raise _wrong(
                "tools", "strict is kept only when a call is certain: set tool_choice to required or a function"
            )
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


def _wrong(param: str, message: str) -> PydanticCustomError:
    return PydanticCustomError("inconsistent", "{message}", {"message": message, "param": param})
