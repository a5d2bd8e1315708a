"""Messages of /v1/messages, and their events."""

import base64
import hashlib
import json
from typing import Any

from paceline.gateway.api.errors import ApiError, claude_error
from paceline.gateway.openai import AnswerPart, Event, PartsAnswer

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesAnswer(PartsAnswer):
    """The blocks of one message: thinking, text and uses of tools."""

    call_prefix = "toolu_"

    def first_events(self) -> list[Event]:
        message = {**self._message([]), "usage": self._usage_object(0)}
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def open_part(self, part: AnswerPart) -> list[Event]:
        block = {
            "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
            "text": {"type": "text", "text": ""},
        }.get(part.kind, {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}})
        return [{"type": "content_block_start", "index": part.index, "content_block": block}]

    def add_text(self, part: AnswerPart, text: str) -> list[Event]:
        if part.kind == "reasoning":
            return [_delta(part, type="thinking_delta", thinking=text)]
        if part.kind == "text":
            return [_delta(part, type="text_delta", text=text)]
        return [_delta(part, type="input_json_delta", partial_json=text)]

    def close_part(self, part: AnswerPart, is_cut: bool) -> list[Event]:
        events = [{"type": "content_block_stop", "index": part.index}]
        if part.kind == "reasoning":
            events.insert(0, _delta(part, type="signature_delta", signature=_signature(part.text)))
        return events

    def finish(self, reason: str) -> list[Event]:
        self._stop_sequence = self._found_stop() if reason == "stop" else None
        self._stop_reason = "stop_sequence" if self._stop_sequence is not None else STOP_REASONS[reason]
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        usage = self._usage_object(self._usage.usage()["completion_tokens"])
        end = {"type": "message_delta", "delta": delta, "usage": usage, "metrics": self._usage.metrics()}
        return [end, {"type": "message_stop"}]

    def response(self) -> dict[str, Any]:
        blocks = [block for part in self.parts if (block := _block(part)) is not None]
        message = self._message(blocks or [{"type": "text", "text": ""}])
        usage = self._usage_object(self._usage.usage()["completion_tokens"])
        ended = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence, "usage": usage}
        return {**message, **ended, "metrics": self._usage.metrics()}

    def failure_event(self, error: ApiError) -> Event:
        return claude_error(error, error.status)

    def _message(self, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._context.model,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _usage_object(self, output_tokens: int) -> dict[str, Any]:
        """Tokens of the prompt that were in the cache are not in `input_tokens`."""
        usage = self._usage.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output_tokens,
        }

    def _found_stop(self) -> str | None:
        """The stop sequence that ended the text. The text itself is without it."""
        stops = self._body.stop or ()
        if not stops or (self.token_ids and self.token_ids[-1] in self._context.tokenizer.eos_ids):
            return None
        text = self._context.tokenizer.decode(self.token_ids, skip_special=False)
        found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
        return min(found)[1] if found else None


def _delta(part: AnswerPart, **delta: str) -> Event:
    return {"type": "content_block_delta", "index": part.index, "delta": delta}


def _block(part: AnswerPart) -> dict[str, Any] | None:
    """The block of a finished part. None for the use of a tool whose input was cut."""
    text = part.text
    if part.kind == "text":
        return {"type": "text", "text": text}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": _signature(text)}
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return None
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": value}


def _signature(thinking: str) -> str:
    """A digest of the thinking: clients require a signature. The server accepts thinking with any."""
    return base64.b64encode(hashlib.sha256(thinking.encode()).digest()).decode()
