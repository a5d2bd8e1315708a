"""One line in the log for every generation, when it is over: who, how much, how long, and how it ended.

What was said is in it only where `log_requests` is `text`.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from paceline.core.output import StepOutput
from paceline.core.request import Request
from paceline.server.openai.errors import as_api_error

logger = logging.getLogger(__name__)

Detail = Literal["none", "ids", "text"]


class LogEntry:
    """What is noted of one generation while it runs."""

    def __init__(self, now: float, with_text: bool) -> None:
        self.started = now
        self.first: float | None = None
        self.tokens = self.drafted = self.accepted = 0
        self.reasons: set[str] = set()
        self.error: BaseException | None = None
        self.text: dict[tuple[str, int], list[str]] | None = {} if with_text else None

    def add(self, outputs: Sequence[StepOutput], now: float) -> None:
        self.first = now if self.first is None else self.first
        for output in outputs:
            self.tokens += len(output.tokens)
            self.drafted += output.drafted
            self.accepted += output.accepted
            if output.finish_reason is not None:
                self.reasons.add(output.finish_reason.value)
            if self.text is not None:
                self.text.setdefault((output.request_id, output.choice), []).append(output.text)


class RequestLog:
    def __init__(self, detail: Detail, decode: Callable[[Sequence[int]], str]) -> None:
        self._detail, self._decode = detail, decode

    @contextmanager
    def entry(self, answer_id: str, who: str, requests: Sequence[Request]) -> Iterator[LogEntry | None]:
        """Inside the block it runs; after it the line is written. None: nothing is."""
        if self._detail == "none":
            yield None
            return
        entry = LogEntry(time.monotonic(), self._detail == "text")
        try:
            yield entry
        except BaseException as error:
            entry.error = error
            raise
        finally:
            self._write(entry, answer_id, who, requests)

    def _write(self, entry: LogEntry, answer_id: str, who: str, requests: Sequence[Request]) -> None:
        fields: dict[str, Any] = {
            "request_id": answer_id,
            "who": who,
            "category": requests[0].category,
            "prompt_tokens": sum(len(request.prompt_ids) for request in requests),
            "output_tokens": entry.tokens,
            "drafted": entry.drafted,
            "accepted": entry.accepted,
            "seconds": round(time.monotonic() - entry.started, 4),
            "reason": _reason(entry),
        }
        if entry.first is not None:
            fields["first_token_seconds"] = round(entry.first - entry.started, 4)
        if requests[0].trace:
            fields["trace_id"] = requests[0].trace.split("-")[1]
        if entry.text is not None:
            fields["prompt"] = [self._decode(request.prompt_ids) for request in requests]
            fields["answer"] = ["".join(text) for text in entry.text.values()]
        logger.info("generated", extra=fields)


def _reason(entry: LogEntry) -> str:
    """How it ended: the finish reasons of its choices, or the code of what went wrong."""
    if entry.error is None:
        return ", ".join(sorted(entry.reasons)) or "cancelled"
    if not isinstance(entry.error, Exception):
        return "cancelled"
    error = as_api_error(entry.error)
    return error.code or error.type
