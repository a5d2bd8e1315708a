"""What both endpoints' answers have in common, streamed or whole."""

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from paceline.core.output import StepOutput
from paceline.core.request import Request
from paceline.models.tokenizer.tokenizer import Tokenizer
from paceline.server.dashboard.origins import OriginTrail
from paceline.server.openai.answers.tally import Tally
from paceline.server.openai.schemas.generation import StreamOptions

DONE = b"data: [DONE]\n\n"
_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Answer(ABC):
    """Takes a request's step outputs and says them in OpenAI's words. A stream has one chunk for each step of a choice that
    brought something; the last one of all has the metrics, and after it, if asked for, comes one with the usage. If asked for,
    a chunk also says where the text came from."""

    prefix: str
    object: str
    chunk_object: str

    def __init__(
        self,
        requests: Sequence[Request],
        model: str,
        fingerprint: str,
        max_depth: int,
        tokenizer: Tokenizer,
        options: StreamOptions | None,
    ) -> None:
        options = options or StreamOptions()
        self._tokenizer = tokenizer
        self._first_choice = {request.id: i * request.sampling.n for i, request in enumerate(requests)}
        self._unfinished = sum(request.sampling.n for request in requests)
        self._tally = Tally(requests, max_depth)
        self._include_usage = options.include_usage
        self._trails = [OriginTrail(tokenizer) for _ in range(self._unfinished)] if options.include_origins else None
        self._head = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "object": self.object,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        # A chunk is written many times a second: all but the choice is written once.
        head = _json({**self._head, "object": self.chunk_object})
        self._chunk_head = f'data: {head[:-1]},"choices":['

    @property
    def id(self) -> str:
        return str(self._head["id"])

    @abstractmethod
    def take(self, index: int, output: StepOutput) -> dict[str, Any] | None:
        """Add the step to choice `index`; returns what a chunk says about it, None when that is nothing."""

    @abstractmethod
    def choices(self) -> list[dict[str, Any]]:
        """All of them, finished."""

    def add(self, output: StepOutput) -> dict[str, Any] | None:
        self._tally.add(output)
        index = self._first_choice[output.request_id] + output.choice
        choice = self.take(index, output)
        if self._trails is not None:
            origins = self._trails[index].pieces(output)
            if choice is not None:
                choice["origins"] = origins
        return choice

    def chunks(self, outputs: Sequence[StepOutput]) -> bytes:
        """Server-sent events for these outputs."""
        events = []
        for output in outputs:
            choice = self.add(output)
            tail = ""
            if output.finish_reason is not None:
                self._unfinished -= 1
                if self._unfinished == 0:
                    tail = f',"metrics":{_json(self._tally.metrics())}'
            if choice is not None:
                usage = ',"usage":null' if self._include_usage else ""
                events.append(f"{self._chunk_head}{_json(choice)}]{usage}{tail}}}\n\n")
        if self._unfinished == 0 and self._include_usage:
            events.append(
                f'{self._chunk_head}],"usage":{_json(self._tally.usage())},"metrics":{_json(self._tally.metrics())}}}\n\n'
            )
        return "".join(events).encode()

    def whole(self) -> dict[str, Any]:
        return {
            **self._head,
            "choices": self.choices(),
            "usage": self._tally.usage(),
            "metrics": self._tally.metrics(),
        }
