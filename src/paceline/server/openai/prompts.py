"""Texts and conversations become token ids."""

import asyncio
import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from paceline.models.tokenizer.chat_template import ChatTemplate
from paceline.models.tokenizer.tokenizer import Tokenizer
from paceline.server.openai.schemas.chat import Tool
from paceline.server.openai.schemas.messages import Message, plain
from paceline.server.openai.tools.tool_use import as_template_tools, spell_out

ASIDE = 8192
"""Characters from which on tokenising is done on another thread: it would hold up everybody's stream."""


class Prompts:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def of_text(self, text: str, add_special: bool = True) -> tuple[int, ...]:
        if len(text) < ASIDE:
            return tuple(self._tokenizer.encode(text, add_special))
        return tuple(await asyncio.to_thread(self._tokenizer.encode, text, add_special))

    async def of_messages(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        """By the model's template. One that does not know tools has them spelled out as text."""
        values = [plain(message) for message in messages]
        offered = as_template_tools(tuple(tools))
        if self._knows_tools:
            for value in values:
                _parse_arguments(value)
            text = self._template.render(values, tools=offered or None)
        else:
            text = self._template.render(spell_out(values, offered))
        return await self.of_text(text, add_special=False)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate.of(self._tokenizer)

    @cached_property
    def _knows_tools(self) -> bool:
        return "tools" in (self._tokenizer.chat_template or "")


def _parse_arguments(message: dict[str, Any]) -> None:
    """Templates write arguments as JSON themselves: given a string they would quote it."""
    for call in message.get("tool_calls", ()):
        try:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        except (ValueError, RecursionError):
            continue
