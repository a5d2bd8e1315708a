"""The answer of /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

from paceline.core.output import StepOutput
from paceline.core.request import Request
from paceline.server.openai.answers.answer import Answer
from paceline.server.openai.answers.logprobs import chat_logprobs
from paceline.server.openai.tools.tool_calls import CallDelta, CallReader, Piece
from paceline.server.openai.tools.tool_use import ToolUse


class _Choice:
    """The message so far."""

    def __init__(self, reader: CallReader | None) -> None:
        self._reader = reader
        self._content: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._started = False
        self.logprobs: list[dict[str, Any]] = []
        self.finish_reason: str | None = None

    def add(self, output: StepOutput) -> dict[str, Any]:
        """What the step adds, as a `delta`."""
        pieces: list[Piece] = [output.text] if output.text else []
        if self._reader is not None:
            pieces = self._reader.push(output.text)
            if output.finish_reason is not None:
                pieces += self._reader.flush()
        delta: dict[str, Any] = {}
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        calls = [piece for piece in pieces if isinstance(piece, CallDelta)]
        if text:
            self._content.append(text)
            delta["content"] = text
        if calls:
            delta["tool_calls"] = [self._add_call(call) for call in calls]
        if output.finish_reason is not None:
            reason = output.finish_reason.value
            self.finish_reason = "tool_calls" if self._calls and reason == "stop" else reason
        if not self._started and (delta or output.finish_reason is not None):
            self._started = True
            delta = {"role": "assistant", "content": None if calls else "", **delta}
        return delta

    def message(self) -> dict[str, Any]:
        content = "".join(self._content)
        if not self._calls:
            return {"role": "assistant", "content": content}
        return {"role": "assistant", "content": content or None, "tool_calls": self._calls}

    def _add_call(self, call: CallDelta) -> dict[str, Any]:
        if call.id is None:
            self._calls[call.index]["function"]["arguments"] += call.arguments
            return {"index": call.index, "function": {"arguments": call.arguments}}
        function = {"name": call.name, "arguments": call.arguments}
        self._calls.append({"id": call.id, "type": "function", "function": dict(function)})
        return {"index": call.index, "id": call.id, "type": "function", "function": function}


class ChatAnswer(Answer):
    prefix, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, requests: Sequence[Request], *about: Any, tool_use: ToolUse | None) -> None:
        super().__init__(requests, *about)
        count = sum(request.sampling.n for request in requests)
        self._choices = [_Choice(tool_use.reader() if tool_use else None) for _ in range(count)]

    def take(self, index: int, output: StepOutput) -> dict[str, Any] | None:
        choice = self._choices[index]
        delta = choice.add(output)
        logprobs = None
        if output.logprobs is not None:
            items = chat_logprobs(output.logprobs, self._tokenizer)
            choice.logprobs += items
            logprobs = {"content": items}
        if not delta and logprobs is None and choice.finish_reason is None:
            return None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def choices(self) -> list[dict[str, Any]]:
        return [
            {
                "index": index,
                "message": choice.message(),
                "logprobs": {"content": choice.logprobs} if choice.logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for index, choice in enumerate(self._choices)
        ]
