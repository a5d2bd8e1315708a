"""Bodies of other APIs, which are translated to the body of a chat request."""

import difflib
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from paceline.gateway.api.bodies import MAX_FIELDS, Body, warn_of
from paceline.gateway.api.chat_bodies import ChatBody

THINKING_VARIABLES = ("enable_thinking", "thinking")
"""Variables of the chat templates that turn reasoning on or off."""
MIN_LIKENESS = 0.8
"""Likeness of an unknown parameter to a known one from which it is taken for a typing error."""


class TranslatedBody(Body):
    """Ignores unknown parameters, which agents add with every version, unless one is nearly the name of a known one."""

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown(cls, values: Any) -> Any:
        if not isinstance(values, dict) or len(values) > MAX_FIELDS:
            return values
        known = {field.alias or name for name, field in cls.model_fields.items()}
        others = [name for name in values if name not in known | cls.ignored | cls.unsupported.keys()]
        for name in others:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=MIN_LIKENESS)
            if nearest and values[name] is not None:
                raise PydanticCustomError(
                    "near_parameter",
                    "unknown parameter {param}; did you mean {nearest}?",
                    {"param": name, "nearest": nearest[0]},
                )
        warn_of(others, "it is not known")
        return {name: value for name, value in values.items() if name not in others}

    @abstractmethod
    def chat_values(self) -> dict[str, Any]:
        """The fields of the chat request with the same meaning."""

    def chat_body(self) -> ChatBody:
        """The chat request with the same meaning. Raises pydantic's `ValidationError`."""
        return ChatBody.model_validate(self.chat_values())


def function_tool(
    name: str, description: str | None, parameters: Mapping[str, Any] | None, strict: bool = False
) -> dict[str, Any]:
    """A tool as chat requests have it."""
    function = {"name": name, "description": description, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": function}


def function_call(call_id: str, name: str, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    """A call in a message of the assistant, as chat requests have it."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def schema_format(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The form of the answer, as chat requests have it."""
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


def joined(texts: Sequence[str]) -> str:
    """The parts of a text, which are paragraphs of their own."""
    return "\n".join(texts)


class Conversation:
    """Collects the messages of a conversation. What the assistant said before its next turn is one message."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add(self, role: str, content: str, **fields: Any) -> None:
        self.messages.append({"role": role, "content": content, **fields})

    def add_text(self, text: str) -> None:
        message = self._assistant("tool_calls")
        message["content"] = f"{message['content']}{text}"

    def add_reasoning(self, text: str) -> None:
        message = self._assistant("content", "tool_calls")
        message["reasoning"] = message.get("reasoning", "") + text

    def add_call(self, call: dict[str, Any]) -> None:
        self._assistant().setdefault("tool_calls", []).append(call)

    def _assistant(self, *before: str) -> dict[str, Any]:
        """The last message, if it is the assistant's and has none of the fields that come behind the next one."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or any(last.get(name) for name in before):
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        return last
