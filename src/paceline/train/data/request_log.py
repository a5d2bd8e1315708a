"""A server's log as a file of prompts: with `log_requests: text` it holds every prompt as the model read it."""

from collections.abc import Mapping
from typing import Any

from paceline.models.tokenizer.tokenizer import Tokenizer
from paceline.train.data.turns import Turns


class RequestLog:
    def __init__(self, tokenizer: Tokenizer, turns: Turns) -> None:
        self._header = tokenizer.decode(turns.to_user, skip_special=False).lstrip() if turns.is_chat else ""
        self._end = tokenizer.decode(turns.to_answer[:1], skip_special=False) if turns.is_chat else ""

    @staticmethod
    def is_line(entry: Any) -> bool:
        return isinstance(entry, Mapping) and "logger" in entry and "message" in entry

    def prompts(self, entry: Mapping[str, Any]) -> list[str]:
        """What users said first in the generation that this line is about; most lines are about something else."""
        return [words for prompt in entry.get("prompt", ()) if (words := self._first_words(prompt))]

    def _first_words(self, prompt: str) -> str:
        """A prompt without turns was not a chat: all of it are the user's words."""
        _, header, rest = prompt.partition(self._header) if self._header else ("", "", "")
        return (rest.partition(self._end)[0] if header else prompt).strip()
