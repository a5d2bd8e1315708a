"""Body of POST /v1/chat/completions."""

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from paceline.gateway.api.bodies import (
    IGNORED_PARAMS,
    MAX_TOKENS,
    UNSUPPORTED_PARAMS,
    GenerationBody,
    UnsupportedParams,
    inconsistent,
)
from paceline.gateway.api.messages import (
    AllowedChoice,
    AssistantMessage,
    Messages,
    ToolChoice,
    Tools,
    content_text,
)

RESERVED_VARIABLES = frozenset({"messages", "tools", "add_generation_prompt"})
"""Variables of a chat template that have a parameter of their own."""


class ChatBody(GenerationBody):
    """Body of POST /v1/chat/completions."""

    unsupported: ClassVar[UnsupportedParams] = {
        **UNSUPPORTED_PARAMS,
        "functions": (([],), "use `tools`"),
        "function_call": (("none",), "use `tool_choice`"),
        "audio": ((), "the model writes text only"),
        "modalities": ((["text"],), "the model writes text only"),
        "web_search_options": ((), "pass a search tool in `tools`"),
        "echo": ((False,), "prepend the last message in the client"),
        "add_special_tokens": ((False,), "the chat template adds the special tokens"),
        "documents": (([],), "put them into a message"),
        "chat_template": ((), "render the messages in the client and use /v1/completions"),
    }

    ignored = (IGNORED_PARAMS - {"include_reasoning"}) | {"prediction", "verbosity"}

    messages: Messages
    add_generation_prompt: bool = True
    """Whether the prompt ends with the start of the assistant's message."""
    continue_final_message: bool = False
    """Whether the answer continues the last message, which is the assistant's. It does not repeat that message."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the model's chat template."""
    reasoning_effort: str | None = Field(None, max_length=32)
    """Variable `reasoning_effort` of the chat template. A template without it ignores it."""
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKENS)
    """Output tokens; without this and `max_tokens` the limit is the model's context window."""
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | AllowedChoice | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    """Whether the answer has the model's reasoning, as `reasoning` and `reasoning_content`."""

    @model_validator(mode="after")
    def _check(self) -> "ChatBody":
        names = [tool.function.name for tool in self.tools or ()]
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise inconsistent("max_tokens", "max_tokens and max_completion_tokens differ: send one of them")
        if (self.chat_template_kwargs or {}).keys() & RESERVED_VARIABLES:
            raise inconsistent(
                "chat_template_kwargs", f"chat_template_kwargs cannot set {', '.join(sorted(RESERVED_VARIABLES))}"
            )
        last = self.messages[-1]
        is_text = isinstance(last, AssistantMessage) and not last.tool_calls
        if self.continue_final_message and not (is_text and len(self.messages) > 1):
            raise inconsistent(
                "continue_final_message",
                "continue_final_message needs other messages, and a last one of the assistant without calls",
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise inconsistent("top_logprobs", "top_logprobs needs logprobs: true")
        if len(set(names)) < len(names):
            raise inconsistent("tools", "two tools have the same name: rename one")
        if self.is_call_forced and not names:
            raise inconsistent("tool_choice", "tool_choice needs tools")
        for name in self.chosen_tools or ():
            if name not in names:
                raise inconsistent("tool_choice", f"tools has no function {name!r}")
        return self

    @property
    def is_call_forced(self) -> bool:
        """Whether the answer has to be a call."""
        if isinstance(self.tool_choice, AllowedChoice):
            return self.tool_choice.allowed_tools.mode == "required"
        return self.tool_choice == "required" or isinstance(self.tool_choice, ToolChoice)

    @property
    def chosen_tools(self) -> frozenset[str] | None:
        """Names of the tools that may be called; None allows all."""
        if isinstance(self.tool_choice, ToolChoice):
            return frozenset({self.tool_choice.name})
        if isinstance(self.tool_choice, AllowedChoice):
            return frozenset(tool.name for tool in self.tool_choice.allowed_tools.tools)
        return None

    @property
    def rendered(self) -> Messages:
        """The messages that the chat template renders."""
        return self.messages[:-1] if self.continue_final_message else self.messages

    @property
    def prefill(self) -> str:
        """The text with which the answer begins."""
        return content_text(self.messages[-1]) if self.continue_final_message else ""

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template that the client sets."""
        effort: dict[str, Any] = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        if self.reasoning_effort == "none":  # the variables of the families whose reasoning can be turned off
            effort |= {"enable_thinking": False, "thinking": False}
        return effort | (self.chat_template_kwargs or {})

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens
