"""An answer as a sequence of parts: reasoning, text and calls of tools, one after the other.

The APIs whose streams name the beginning and the end of each part extend `PartsAnswer`. It makes the parts of the same step
outputs, with the same parsers, as the answers of /v1/chat/completions.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from paceline.core.output import StepOutput
from paceline.core.request import ValidatedRequest
from paceline.gateway.api.bodies import StreamOptions
from paceline.gateway.api.errors import ApiError
from paceline.gateway.formats import CallDelta, Reasoning
from paceline.gateway.openai.answer import UsageCounter
from paceline.gateway.openai.chat import only_text
from paceline.gateway.openai.resumption import LastEvent, StreamPosition
from paceline.gateway.openai.service import ChatStart

Event = dict[str, Any]
_json = msgspec.json.Encoder().encode


@dataclass(slots=True)
class AnswerPart:
    """A part of an answer."""

    kind: Literal["reasoning", "text", "call", "custom"]
    """`custom` is a call of a tool whose input is a text."""
    index: int
    """Position in the answer."""
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text, or the arguments of a call as JSON."""
        return "".join(self.pieces)


class PartsAnswer(ABC):
    """The only answer to a chat request, as events of its stream or as one response."""

    content_type = b"text/event-stream; charset=utf-8"
    end = b""
    call_prefix = "call_"
    """Start of the ids of calls."""

    def __init__(self, start: ChatStart) -> None:
        (self._request,) = start.requests
        self._id, self._context, self._body = start.id, start.context, start.body
        self._parser, self._custom = start.new_parser(), start.custom
        self._usage = UsageCounter(start.requests, start.context.max_depth)
        options = start.body.stream_options or StreamOptions()
        self._position = StreamPosition(1) if options.resumable else None
        self._is_begun = False
        self._may_begin_with_space = not (start.continues_prompt or start.context.tokenizer.is_byte_level)
        self.parts: list[AnswerPart] = []
        self.token_ids: list[int] = []
        self.num_reasoning_tokens = 0
        """Tokens of the steps before the first one with text or a call."""
        self.fingerprint = ""

    @abstractmethod
    def first_events(self) -> list[Event]:
        """The events before the first part."""

    @abstractmethod
    def open_part(self, part: AnswerPart) -> list[Event]: ...

    @abstractmethod
    def add_text(self, part: AnswerPart, text: str) -> list[Event]: ...

    @abstractmethod
    def close_part(self, part: AnswerPart, is_cut: bool) -> list[Event]:
        """`is_cut` says whether the answer ended because of its limit."""

    @abstractmethod
    def finish(self, reason: str) -> list[Event]:
        """The events after the last part."""

    @abstractmethod
    def response(self) -> dict[str, Any]:
        """The body of a response that is not streamed."""

    @abstractmethod
    def failure_event(self, error: ApiError) -> Event: ...

    @property
    def id(self) -> str:
        return self._id

    @property
    def is_resumable(self) -> bool:
        return self._position is not None

    def begin(self, request: ValidatedRequest) -> None:
        """The answer is a resumable stream of this request, which has its resume key."""
        assert self._position is not None
        self._position.begin(request, None)

    def resume(self, request: ValidatedRequest, event: LastEvent, outputs: Sequence[StepOutput]) -> None:
        """Becomes the answer of `event`, the last one that the client has. `outputs` are those up to there, if a worker has
        kept them. The events of later outputs up to `event` are dropped."""
        assert self._position is not None
        self._id = event.answer_id
        self._position.begin(request, event)
        self.chunks(outputs)

    def split(self, outputs: Sequence[StepOutput]) -> list[StepOutput]:
        """The outputs, divided where the part ends that the client of a resumed stream has."""
        assert self._position is not None
        return self._position.split(outputs)

    @property
    def is_before_event(self) -> bool:
        """Whether the stream is generated again, and has not reached the last event that the client has."""
        return self._position is not None and self._position.is_before_event

    def add(self, output: StepOutput) -> list[Event]:
        """Adds a step output, and returns its events."""
        self._usage.add(output)
        self.token_ids += output.tokens
        self.fingerprint = output.fingerprint or self.fingerprint
        text = output.text
        if text and self._may_begin_with_space:
            self._may_begin_with_space, text = False, text.removeprefix(" ")
        pieces = self._parser.push(text)
        if output.finish_reason is not None:
            pieces += self._parser.flush()
        events: list[Event] = []
        if not self._is_begun:
            self._is_begun = True
            events += self.first_events()
        for piece in pieces:
            if isinstance(piece, Reasoning):
                if self._body.include_reasoning:
                    events += self._add("reasoning", piece.text)
            elif isinstance(piece, CallDelta):
                events += self._add_call(piece)
            elif piece:
                events += self._add("text", piece)
        if self.parts and self.parts[-1].kind == "reasoning":
            self.num_reasoning_tokens += len(output.tokens)
        if output.finish_reason is not None:
            reason = output.finish_reason.value
            events += self._close_last(is_cut=reason == "length")
            has_call = any(part.kind in ("call", "custom") for part in self.parts)
            events += self.finish("tool_calls" if has_call and reason == "stop" else reason)
        return events

    def chunks(self, outputs: Sequence[StepOutput]) -> bytes:
        """The events of these outputs, as the stream has them. In a resumable stream the last event of an output has an id."""
        parts: list[bytes] = []
        for output in outputs:
            events = self.add(output)
            if self._position is not None:
                self._position.add(output)
                if self._position.is_seen(0):
                    continue
            parts += map(self.encode, events)
            if self._position is not None and events:
                parts[-1] = b"id: %s\n%s" % (self._position.event_id(self._id).encode(), parts[-1])
        return b"".join(parts)

    def encode(self, event: Event) -> bytes:
        """A server-sent event with its type as its name."""
        return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), _json(event))

    def failure(self, error: ApiError) -> bytes:
        """The event of an error after the start of the stream."""
        return self.encode(self.failure_event(error))

    def _add(self, kind: Literal["reasoning", "text"], text: str) -> list[Event]:
        events: list[Event] = []
        if not self.parts or self.parts[-1].kind != kind:
            events += self._open(AnswerPart(kind, len(self.parts)))
        part = self.parts[-1]
        part.pieces.append(text)
        return events + self.add_text(part, text)

    def _add_call(self, call: CallDelta) -> list[Event]:
        events: list[Event] = []
        if call.id is not None:
            name = call.name or ""
            kind: Literal["call", "custom"] = "custom" if name in self._custom else "call"
            # A stream that is resumed has the same ids
            call_id = f"{self.call_prefix}{self._id.rpartition('_')[2]}{len(self.parts):02x}"
            events += self._open(AnswerPart(kind, len(self.parts), call_id, name))
        part = next(part for part in reversed(self.parts) if part.kind in ("call", "custom"))
        part.pieces.append(call.arguments)
        # The input of a custom tool is known when its arguments are complete
        return events + (self.add_text(part, call.arguments) if part.kind == "call" and call.arguments else [])

    def _open(self, part: AnswerPart) -> list[Event]:
        events = self._close_last(is_cut=False)
        self.parts.append(part)
        return events + self.open_part(part)

    def _close_last(self, is_cut: bool) -> list[Event]:
        if not self.parts:
            return []
        part, events = self.parts[-1], []
        if part.kind == "custom":
            part.pieces = [only_text(part.text)]
            events = self.add_text(part, part.text)
        return events + self.close_part(part, is_cut)
