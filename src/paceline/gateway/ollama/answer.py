"""Answers of /api/chat and /api/generate: one JSON object, or a line for each part of the text."""

import json
import time
from datetime import UTC, datetime
from typing import Any

import msgspec

from paceline.core.output import StepOutput
from paceline.gateway.api.errors import ApiError
from paceline.gateway.openai import AnswerPart, ChatStart, Event, PartsAnswer

NANOSECONDS = 1_000_000_000
_json = msgspec.json.Encoder().encode


def utc_now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class OllamaAnswer(PartsAnswer):
    """An answer of one model. Calls come whole, when they are complete."""

    content_type = b"application/x-ndjson"

    def __init__(self, start: ChatStart, is_chat: bool, name: str) -> None:
        """`name` is the model's, as the client named it."""
        super().__init__(start)
        self._is_chat, self._name = is_chat, name
        self._began = time.perf_counter()
        self._first: float | None = None
        """Seconds until the first token."""
        self._last: Event = {}

    def add(self, output: StepOutput) -> list[Event]:
        if self._first is None:
            self._first = time.perf_counter() - self._began
        return super().add(output)

    def first_events(self) -> list[Event]:
        return []

    def open_part(self, part: AnswerPart) -> list[Event]:
        return []

    def add_text(self, part: AnswerPart, text: str) -> list[Event]:
        if part.kind not in ("text", "reasoning"):
            return []
        return [self._line(**self._said(text if part.kind == "text" else "", text if part.kind == "reasoning" else ""))]

    def close_part(self, part: AnswerPart, is_cut: bool) -> list[Event]:
        call = _call(part)
        return [] if call is None else [self._line(**self._said("", "", [call]))]

    def finish(self, reason: str) -> list[Event]:
        first, total = self._first or 0.0, time.perf_counter() - self._began
        usage = self._usage.usage()
        self._last = {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": int(total * NANOSECONDS),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": int(first * NANOSECONDS),
            "eval_count": usage["completion_tokens"],
            "eval_duration": int((total - first) * NANOSECONDS),
            "metrics": self._usage.metrics(),
        }
        return [{**self._line(**self._said("", "")), **self._last}]

    def response(self) -> dict[str, Any]:
        text, thinking = (
            "".join(part.text for part in self.parts if part.kind == kind) for kind in ("text", "reasoning")
        )
        calls = [call for part in self.parts if (call := _call(part)) is not None]
        return {**self._line(**self._said(text, thinking, calls)), **self._last}

    def failure_event(self, error: ApiError) -> Event:
        return {"error": str(error)}

    def encode(self, event: Event) -> bytes:
        """A line of JSON."""
        return _json(event) + b"\n"

    def _line(self, **said: Any) -> Event:
        return {"model": self._name, "created_at": utc_now(), **said, "done": False}

    def _said(self, text: str, thinking: str, calls: list[dict[str, Any]] | None = None) -> dict[str, Any]:
        """The text where each of the two routes has it."""
        thought = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return {"response": text, **thought}
        return {
            "message": {"role": "assistant", "content": text, **thought, **({"tool_calls": calls} if calls else {})}
        }


def _call(part: AnswerPart) -> dict[str, Any] | None:
    """The call of a finished part. None for a text, and for a call whose arguments were cut."""
    if part.kind not in ("call", "custom"):
        return None
    try:
        arguments = json.loads(part.text or "{}")
    except (ValueError, RecursionError):
        return None
    return {"id": part.call_id, "function": {"index": part.index, "name": part.name, "arguments": arguments}}
