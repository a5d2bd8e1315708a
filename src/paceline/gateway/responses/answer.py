"""Responses of /v1/responses, and their events in the order that OpenAI publishes."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.gateway.api.errors import ApiError
from paceline.gateway.api.responses_bodies import ResponsesBody, sealed
from paceline.gateway.openai import AnswerPart, ChatStart, Event, PartsAnswer

ITEM_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc", "custom": "ctc"}


class ResponsesAnswer(PartsAnswer):
    """The items of one response: reasoning, messages and calls."""

    def __init__(
        self, start: ChatStart, body: ResponsesBody, keep: Callable[[Mapping[str, Any], Sequence[Event]], None]
    ) -> None:
        """`keep` receives the finished response and its items, before the client does."""
        super().__init__(start)
        self._asked, self._keep = body, keep
        self._created = int(time.time())
        self._number = 0
        """Number of the next event."""
        self._items: list[dict[str, Any]] = []
        """Finished items."""
        self._final: dict[str, Any] | None = None
        self._is_summary = body.reasoning is not None and body.reasoning.summary is not None

    def first_events(self) -> list[Event]:
        response = self._response("in_progress")
        return [self._event("created", response=response), self._event("in_progress", response=response)]

    def open_part(self, part: AnswerPart) -> list[Event]:
        item = self._item(part, "in_progress", "")
        events = [self._event("output_item.added", output_index=part.index, item=item)]
        if part.kind == "reasoning" and self._is_summary:
            events.append(self._summary("part.added", part, part={"type": "summary_text", "text": ""}))
        elif part.kind in ("text", "reasoning"):
            events.append(self._content("content_part.added", part, part=_content_part(part, "")))
        return events

    def add_text(self, part: AnswerPart, text: str) -> list[Event]:
        if part.kind == "reasoning" and self._is_summary:
            return [self._summary("text.delta", part, delta=text)]
        if part.kind == "reasoning":
            return [self._content("reasoning_text.delta", part, delta=text)]
        if part.kind == "text":
            return [self._content("output_text.delta", part, delta=text, logprobs=[])]
        return [self._of(f"{_arguments(part)}.delta", part, delta=text)]

    def close_part(self, part: AnswerPart, is_cut: bool) -> list[Event]:
        text = part.text
        if part.kind == "reasoning" and self._is_summary:
            summary = {"type": "summary_text", "text": text}
            events = [self._summary("text.done", part, text=text), self._summary("part.done", part, part=summary)]
        elif part.kind in ("text", "reasoning"):
            done = self._content("reasoning_text.done", part, text=text)
            if part.kind == "text":
                done |= {"type": "response.output_text.done", "logprobs": []}
            events = [done, self._content("content_part.done", part, part=_content_part(part, text))]
        elif part.kind == "call":
            events = [self._of("function_call_arguments.done", part, name=part.name, arguments=text)]
        else:
            events = [self._of("custom_tool_call_input.done", part, input=text)]
        item = self._item(part, "incomplete" if is_cut else "completed", text)
        self._items.append(item)
        return [*events, self._event("output_item.done", output_index=part.index, item=item)]

    def finish(self, reason: str) -> list[Event]:
        status = "incomplete" if reason == "length" else "completed"
        self._final = self._response(status)
        self._keep(self._final, self._items)
        return [self._event(status, response=self._final)]

    def response(self) -> dict[str, Any]:
        assert self._final is not None
        return self._final

    def failure_event(self, error: ApiError) -> Event:
        failed = {**self._response("failed"), "error": {"code": error.code or error.type, "message": str(error)}}
        return self._event("failed", response=failed)

    def _event(self, kind: str, /, **fields: Any) -> Event:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **fields}

    def _of(self, kind: str, part: AnswerPart, /, **fields: Any) -> Event:
        return self._event(kind, item_id=self._item_id(part), output_index=part.index, **fields)

    def _content(self, kind: str, part: AnswerPart, /, **fields: Any) -> Event:
        return self._of(kind, part, content_index=0, **fields)

    def _summary(self, kind: str, part: AnswerPart, /, **fields: Any) -> Event:
        return self._of(f"reasoning_summary_{kind}", part, summary_index=0, **fields)

    def _item_id(self, part: AnswerPart) -> str:
        return f"{ITEM_PREFIXES[part.kind]}_{self.id.removeprefix('resp_')}{part.index:02x}"

    def _item(self, part: AnswerPart, status: str, text: str) -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(part), "status": status}
        is_done = status != "in_progress"
        if part.kind == "text":
            content = [_content_part(part, text)] if is_done else []
            return {**item, "type": "message", "role": "assistant", "content": content}
        if part.kind == "call":
            return {**item, "type": "function_call", "call_id": part.call_id, "name": part.name, "arguments": text}
        if part.kind == "custom":
            return {**item, "type": "custom_tool_call", "call_id": part.call_id, "name": part.name, "input": text}
        summary = [{"type": "summary_text", "text": text}] if is_done and self._is_summary else []
        item |= {"type": "reasoning", "summary": summary}
        if not self._is_summary:
            item["content"] = [_content_part(part, text)] if is_done else []
        if is_done and self._asked.is_sealed:
            item["encrypted_content"] = sealed(text)
        return item

    def _response(self, status: str) -> dict[str, Any]:
        asked, sampling = self._asked, self._request.sampling
        is_final = status in ("completed", "incomplete")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "model": self._context.model,
            "output": list(self._items),
            "parallel_tool_calls": asked.parallel_tool_calls,
            "previous_response_id": asked.previous_response_id,
            "prompt_cache_key": asked.prompt_cache_key,
            "reasoning": _dumped(asked.reasoning) or {"effort": None, "summary": None},
            "safety_identifier": asked.safety_identifier,
            "service_tier": "default",
            "store": asked.store,
            "system_fingerprint": self.fingerprint or None,
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}, **_dumped(asked.text)},
            "tool_choice": _dumped(asked.tool_choice) or "auto",
            "tools": [_dumped(tool) for tool in asked.tools or ()],
            "top_logprobs": 0,
            "top_p": sampling.top_p,
            "truncation": "disabled",
            "usage": self._usage_object() if is_final else None,
            "user": asked.user,
            "metadata": asked.metadata or {},
            **({"metrics": self._usage.metrics()} if is_final else {}),
        }

    def _usage_object(self) -> dict[str, Any]:
        usage = self._usage.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }


def _arguments(part: AnswerPart) -> str:
    return "function_call_arguments" if part.kind == "call" else "custom_tool_call_input"


def _content_part(part: AnswerPart, text: str) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _dumped(value: Any) -> Any:
    """A part of the body as the client sent it."""
    if value is None or isinstance(value, str):
        return value or {}
    return value.model_dump(by_alias=True, exclude_none=True)
